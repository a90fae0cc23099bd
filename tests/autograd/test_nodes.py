"""Autograd's nodes for plain tensors: what torch.library's formula gives, without the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm._native import ops
from epigemm.arguments.calls import LinearCall
from epigemm.calls import by_reference, entry
from epigemm.packs import weight_packs
from epigemm.planner.reasons import Reason
from tests.support.public import PUBLIC, Arguments, Public, map_tensors, tensors_of
from tests.support.untyped import backward
from tests.support.untyped import torch as untyped

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends calls to the dispatcher, whose kernels then take torch.library's formula; changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is left to PyTorch's own operators, as small ones are: test_nodes_by_torch.py."""
    monkeypatch.setattr(entry, "_may_torch_record", lambda *call: False)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"node": nullcontext, "formula": Seen}


def leaves(arguments: Arguments) -> Arguments:
    return map_tensors(arguments, lambda t: t.detach().clone().requires_grad_())


def both_ways(call: Callable[[], Any]) -> list[Any]:
    found = []
    for way in WAYS.values():
        with way():
            found.append(call())
    return found


@functions
@dtypes
@pytest.mark.parametrize("tensor_scalar", [False, True], ids=["number", "tensor"])
def test_the_node_gives_what_the_formula_gives(
    function: Public, dtype: torch.dtype, tensor_scalar: bool, device: torch.device, rng: torch.Generator
) -> None:
    """Results, first and second derivatives. The backward passes run outside of the mode, as after a checkpoint."""
    arguments = function.draw(rng, dtype=dtype, device=device, tensor_scalar=tensor_scalar)
    found = []
    for way in WAYS.values():
        given = leaves(arguments)
        inputs = list(tensors_of(given).values())
        with way():
            result = function.call(**given)
        first = torch.autograd.grad(result, inputs, torch.ones_like(result), retain_graph=True)
        tracked = torch.autograd.grad(result, inputs, torch.ones_like(result), create_graph=True)
        total = torch.stack([gradient.double().square().sum() for gradient in tracked]).sum()
        second = torch.autograd.grad(total, inputs, materialize_grads=True)
        found.append([result.detach(), *first, *tracked, *second])
    tolerance = 64 * torch.finfo(dtype).eps
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.every(5)
@functions
@dtypes
@pytest.mark.parametrize("frozen", ["", "x", "weight", "bias"])
def test_the_node_saves_what_the_formula_saves(
    function: Public, dtype: torch.dtype, frozen: str, rng: torch.Generator
) -> None:
    given = leaves(function.draw(rng, dtype=dtype, tensor_scalar=True))
    if frozen in given:
        given[frozen].requires_grad_(False)
    names = {tensor.data_ptr(): name for name, tensor in tensors_of(given).items()}

    def call() -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        saved = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append((names.get(tensor.data_ptr(), ""), tuple(tensor.shape), tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function.call(**given)
        return sorted(saved, key=str)

    mine, other = both_ways(call)
    assert mine == other


def node_name(result: Tensor) -> str:
    return type(result.grad_fn).__name__


def test_operators_called_directly_take_the_same_nodes() -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5)

    def call() -> list[str]:
        return [
            node_name(ops.linear("bias", x, weight, None, [], [], "default")),
            node_name(ops.linear("relu_div", x, weight, None, [], [2.0], "default")),
            node_name(ops.elementwise("sigmoid", x, None, [], [])),
        ]

    mine, other = both_ways(call)
    assert mine == [
        "_LinearBackward",
        "_LinearWithProductBackward",
        "_ElementwiseBackward",
    ]
    assert [name.startswith("GeneratedBackwardFor_epigemm_") for name in other] == [True] * 3


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "x": ("linear_relu", {"x": torch.zeros(9, 23)}),
    "dtype": ("linear_relu_div", {"weight": torch.zeros(16, 24, dtype=torch.float64)}),
    "bias": ("linear_sigmoid_scale_residual", {"bias": torch.zeros(15)}),
    "one bias": ("linear", {"bias": torch.zeros(1)}),
    "matrix": ("linear", {"weight": torch.zeros(24)}),
    "scale": ("linear_scale", {"scale": torch.zeros(3)}),
    "divisor": ("linear_relu_div", {"divisor": torch.zeros(2)}),
    "number": ("relu_div", {"divisor": "2"}),
    "vector": ("bias_relu", {"bias": torch.zeros(15)}),
    "precision": ("linear", {"precision": "fast"}),
    "strict": ("linear", {"strict": True}),
    "flag": ("linear_relu", {"strict": 1}),
    "out": ("linear_relu", {"out": torch.zeros(9, 16)}),
    "out in place": ("sigmoid", {"out": torch.zeros(9, 16)}),
    "statistics": ("scale_batch_norm", {"running_var": torch.zeros(17)}),
    "integers": ("sigmoid", {"x": torch.zeros(2, dtype=torch.int32)}),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_errors_are_the_same(
    case: tuple[str, dict[str, Any]], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come before anything is launched."""
    name, wrong = case
    function = next(f for f in PUBLIC if f.name == name)
    given = {**leaves(function.draw(rng)), **wrong}
    if not any(tensor.requires_grad for tensor in tensors_of(given).values()):
        pytest.skip("nothing that can require a gradient")
    if "strict" not in wrong:
        monkeypatch.setattr(by_reference, "of_call", None)

    def call() -> tuple[type[BaseException], str]:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            function.call(**given)
        return caught.type, str(caught.value)

    mine, other = both_ways(call)
    assert mine == other
    assert "NoneType" not in mine[1]


@pytest.mark.parametrize("name", ["linear_relu", "linear_relu_div", "linear_scale"])
@pytest.mark.parametrize("learns", [False, True])
def test_packs_of_changing_weights_expire(
    name: str, learns: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired: list[Tensor] = []
    uses: list[str] = []
    operator = entry.call_linear

    def watched(call: LinearCall) -> Tensor | Reason:
        uses.append(call.pack_use)
        return operator(call)

    given = leaves(next(f for f in PUBLIC if f.name == name).draw(rng))
    given["weight"].requires_grad_(learns)
    monkeypatch.setattr(weight_packs, "expire", expired.append)
    monkeypatch.setattr(entry, "call_linear", watched)
    getattr(epigemm, name)(**given)
    assert uses == [weight_packs.NONE if learns else weight_packs.FIND]
    assert [id(weight) for weight in expired] == ([id(given["weight"])] if learns else [])


def test_tensors_of_a_transformation_that_is_over() -> None:
    leaked: list[Tensor] = []
    x, weight = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)

    def leak(row: Tensor) -> Tensor:
        leaked.append(row)
        return row.sum()

    torch.func.grad(leak)(x)
    result = epigemm.linear_relu(leaked[0], weight)
    backward(result.sum())
    expected = torch.autograd.grad(torch.relu(x @ weight.t()).sum(), weight)
    torch.testing.assert_close((weight.grad,), expected)


def draw(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(*size, dtype=torch.float64, device=device, requires_grad=True)
        for size in ((3, 5), (4, 5), (4,), (4,))
    )


@pytest.mark.parametrize("name", ["linear", "linear_relu"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (5,)], ids=str)
def test_results_are_no_views(name: str, learns: bool, shape: tuple[int, ...], device: torch.device) -> None:
    """They may be written in place, at the first call and at later ones, whatever was remembered."""
    x = torch.randn(*shape, device=device)
    weight = torch.randn(4, 5, device=device, requires_grad=learns)
    bias, other = torch.randn(4, device=device), torch.randn(4, device=device, requires_grad=True)
    for _ in range(3):
        result = getattr(epigemm, name)(x, weight, bias)
        assert not result._is_view()
        if name == "linear" or not learns:
            result += other
            result.sum().backward()
    with torch.no_grad():
        result = getattr(epigemm, name)(x, weight, bias)
    result += other
    assert result.requires_grad


@pytest.mark.parametrize("learns", [False, True])
def test_functional_tensors_outside_of_a_mode(learns: bool) -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    wrapped = [untyped._to_functional_tensor(t) for t in (x, weight.clone().requires_grad_(learns), bias)]
    untyped._enable_functionalization(reapply_views=True)
    try:
        result = ops.linear("relu_div", *wrapped, [], [2.0], "default")
        untyped._sync(result)
        plain = untyped._from_functional_tensor(result)
    finally:
        untyped._disable_functionalization()
    torch.testing.assert_close(plain.detach(), torch.relu(torch.nn.functional.linear(x, weight, bias)) / 2)
