"""What is recorded while a module runs: for each call what `explain` says of the function, and PyTorch's products."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.calls.log import current
from epigemm.explain.answer import Product
from epigemm.explain.listener import Listener
from epigemm.packs import weight_packs
from tests.support.pieces import Road
from tests.support.public import PUBLIC, Public


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def heard(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Product], Any]:
    """The products of a function's call, and its result."""
    module = Calls(function)
    listener = Listener(module)
    with listener:
        result = module(*args, **kwargs)
    return listener.products, result


def drawn(function: Public, rng: torch.Generator, dtype: torch.dtype, gradients: bool) -> dict[str, Any]:
    arguments = function.draw(rng, dtype=dtype)
    for name, value in arguments.items():
        if gradients and isinstance(value, Tensor) and "running" not in name:
            value.requires_grad_()
    return arguments


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_is_told_as_explain_tells_it(
    function: Public, dtype: torch.dtype, gradients: bool, rng: torch.Generator
) -> None:
    """One product, also where a folded BatchNorm is two calls to who looks; and the result is the call's."""
    arguments = drawn(function, rng, dtype, gradients)
    wanted = epigemm.explain(function.name, **arguments)
    (product,), result = heard(function.call, **arguments)
    assert product.explanation is not None
    assert replace(product.explanation, op=wanted.op) == wanted
    assert product.dtype == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(result, function.call(**arguments), rtol=1e-2, atol=1e-2)


def test_two_calls_of_a_caller_are_two(rng: torch.Generator) -> None:
    """A product, and behind it an elementwise BatchNorm that the caller asks for."""
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((4, 16), (8, 16), (8,)))
    ones = torch.ones(8).bfloat16()

    def both() -> Tensor:
        return epigemm.scale_batch_norm(epigemm.linear(x, weight, bias), ones, ones, ones)

    products, _ = heard(both)
    assert [each.runs for each in products] == ["fallback", "elementwise kernel"]
    assert [each.size for each in products] == [(4, 8, 16), (4, 8)]


def test_casts_of_autocast_belong_to_the_call() -> None:
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)

    def casts() -> Tensor:
        x.to(torch.float64)  # the caller's own
        return epigemm.linear(x, weight, bias)

    with torch.autocast("cpu", torch.bfloat16):
        (product,), _ = heard(casts)
        wanted = epigemm.explain("linear", x, weight, bias)
    assert product.explanation is not None
    assert product.explanation.kernels == wanted.kernels
    assert sum("torch cast" in kernel for kernel in wanted.kernels) == 3


def test_a_predicted_time_is_that_of_the_plan(road: Road) -> None:
    """On a pretended GPU: the product on fp16 slices, and one too small for them, which falls back."""
    x, weight = road.x(), nn.Parameter(road.weight(), requires_grad=False)
    (product,), _ = heard(lambda: epigemm.linear(x, weight))
    call = epigemm.explain("linear", x, weight)
    assert product.runs == "fused kernel" and product.explanation is not None
    assert product.explanation.us == call.us == call.candidates[0]["predicted_us"]
    assert f"{call.us:.1f} us predicted" in product.columns
    small = x[:4]
    (product,), _ = heard(lambda: epigemm.linear(small, weight))
    assert product.runs == "fallback" and product.explanation is not None
    assert product.explanation.us is not None and product.explanation.us > 0


def test_no_pack_is_made(road: Road) -> None:
    """A layer keeps its weight's slices; what is said of a call that would make them is said, and nothing is kept."""
    layer = epigemm.nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(road.weight(), requires_grad=False)
    listener = Listener(layer)
    with listener:
        layer(road.x())
    (product,) = listener.products
    assert product.explanation is not None
    assert any("made by this call and kept" in reason for reason in product.explanation.reasons)
    assert not weight_packs.kept(layer.weight)


A, B = torch.randn(4, 16), torch.randn(16, 8)
BATCHES = torch.randn(3, 8, 4)
BY_TORCH: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "linear": (lambda: F.linear(A, B.t()), (4, 8, 16), 1),
    "linear of batches": (lambda: F.linear(A.expand(5, 4, 16), B.t(), bias=torch.ones(8)), (20, 8, 16), 1),
    "@": (lambda: A @ B, (4, 8, 16), 1),
    "matmul": (lambda: torch.matmul(A, B), (4, 8, 16), 1),
    "mm": (lambda: A.mm(B), (4, 8, 16), 1),
    "mv": (lambda: A.mv(B[:, 0]), (4, 1, 16), 1),
    "addmm": (lambda: torch.addmm(torch.zeros(8), A, B), (4, 8, 16), 1),
    "bmm": (lambda: torch.bmm(BATCHES, BATCHES.mT), (8, 8, 4), 3),
    "broadcast": (lambda: BATCHES.expand(2, 3, 8, 4) @ BATCHES.mT, (8, 8, 4), 6),
    "baddbmm": (lambda: torch.baddbmm(torch.zeros(3, 8, 8), BATCHES, BATCHES.mT), (8, 8, 4), 3),
    "linalg.matmul": (lambda: torch.linalg.matmul(A, B), (4, 8, 16), 1),
    "einsum": (lambda: torch.einsum("ij,jk->ik", A, B), (), 1),
    "inner": (lambda: torch.inner(A, A), (), 1),
    "multi_dot": (lambda: torch.linalg.multi_dot([A, B, B.t()]), (), 1),
    "lstm": (lambda: nn.LSTM(16, 3)(A), (), 1),
    "gru_cell": (lambda: nn.GRUCell(16, 3)(A), (), 1),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_products_of_pytorchs(name: str) -> None:
    function, size, batch = BY_TORCH[name]
    (product,), _ = heard(function)
    assert (product.size, product.batch, product.dtype) == (size, batch, "float32")
    assert product.runs == "PyTorch's own" and product.explanation is None
    assert bool(product.why) is not bool(size)


def test_layers_are_named_where_the_call_is() -> None:
    """By the innermost module, though it be shared, in a list, or called by another method than forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), epigemm.nn.LinearReLU(8, 8)])
            self.again = self.layers[0]

        def encode(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, self.again]:
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encode(x), torch.eye(8))

    model = Model()
    listener = Listener(model)
    with listener:
        model(torch.randn(2, 8))
    names = [each.name for each in listener.products]
    assert names == ["layers.0", "layers.1", "layers.0#2", "Model"] and len(listener.calls) == 1


def test_it_belongs_to_its_thread() -> None:
    listener, found = Listener(nn.Identity()), []
    with listener:
        thread = threading.Thread(target=lambda: found.append(current.log))
        thread.start()
        thread.join()
        assert current.log is listener
        with listener.paused():
            A @ B
            with listener:
                A @ B
    assert found == [None] and current.log is None
    assert len(listener.products) == 1
