"""What a site asks at every call: each of these once gave a number, or an error, that the unfused model does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm import call, fusion, packs
from tests.fusion.test_graphs import by_fx, functions

ROWS, IN, OUT = 5, 12, 8


class Added(nn.Module):
    """A layer without a bias, and one that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.extra = nn.Linear(IN, OUT, bias=False), nn.Parameter(torch.randn(OUT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x) + self.extra)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(IN, OUT), nn.BatchNorm1d(OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))  # type: ignore[no-any-return]


class Divided(nn.Module):
    """By a 0-d buffer."""

    divisor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, OUT)
        self.register_buffer("divisor", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x)) / self.divisor


def relu_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, OUT), nn.ReLU())


def a_bias_is_set(model: Any) -> None:
    model.fc.bias = nn.Parameter(torch.randn(OUT))


def a_layer_is_replaced(model: Any) -> None:
    model.fc = nn.Sequential(nn.Linear(IN, OUT))


def the_norm_is_replaced(model: Any) -> None:
    model.norm = nn.LayerNorm(OUT)


def the_divisor_is_zero(model: Any) -> None:
    model.divisor.zero_()


def the_divisor_is_wide(model: Any) -> None:
    model.to(torch.float16)
    model.divisor = torch.tensor(1e6)


def the_divisor_is_an_integer(model: Any) -> None:
    model.divisor = torch.tensor(3)


def the_vectors_differ(model: Any) -> None:
    model.to(torch.bfloat16)
    model.norm.weight.data = model.norm.weight.data.float()


def eps_is_negative(model: Any) -> None:
    model.norm.eps = -3.0


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[Any], None], bool]] = [
    (Added, a_bias_is_set, False),
    (Added, a_layer_is_replaced, False),
    (Normed, a_layer_is_replaced, False),
    (Normed, the_norm_is_replaced, False),
    (Normed, the_vectors_differ, False),
    (Normed, eps_is_negative, False),
    (Divided, the_divisor_is_zero, True),
    (Divided, the_divisor_is_wide, False),
    (Divided, the_divisor_is_an_integer, False),
]


@pytest.mark.parametrize(
    ("make", "change", "fused"), CHANGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_changes_after_fusing(
    make: Callable[[], nn.Module], change: Callable[[Any], None], fused: bool
) -> None:
    """By the module's own guard or by the site: the same result or error, fused only where that is right."""
    model = make().eval()
    fast = epigemm.fuse(model)
    for changed in (model, fast):
        torch.manual_seed(5)
        change(changed)
    x = torch.randn(ROWS, IN, dtype=next(model.parameters()).dtype)
    try:
        expected = model(x)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            fast(x)
        return
    with fusion.watch() as unfused:
        actual = fast(x)
    assert (unfused == []) == fused
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("change", [a_bias_is_set, a_layer_is_replaced, the_norm_is_replaced])
def test_sites_ask_for_themselves(change: Callable[[Any], None]) -> None:
    """Where no guard of a module stands before them."""
    model = (Normed() if change is the_norm_is_replaced else Added()).eval()
    graph_module: Any
    graph_module, report = by_fx(model, [torch.randn(ROWS, IN)])
    assert functions(report) != ()
    for changed in (graph_module, model):
        torch.manual_seed(5)
        change(changed)
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-5, atol=1e-5)


def test_the_forward_of_a_class_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of adapters and quantisation do it, before or after."""
    model = relu_layer()
    before = epigemm.fuse(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight * 2))
    x = torch.randn(ROWS, IN)
    with fusion.watch() as unfused:
        torch.testing.assert_close(before(x), model(x))
    assert len(unfused) == 1
    assert not epigemm.fuse(model, dry_run=True).sites
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="epigemm", options={"backend": "eager"})
    torch.testing.assert_close(compiled(x), model(x))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.relu else result


class Negating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.ops.aten.relu.default else result


@pytest.mark.parametrize("mode", [Doubling, Negating])
def test_modes_that_see_operators(mode: Any) -> None:
    """They see the model's own."""
    model = relu_layer()
    fused = epigemm.fuse(model)
    x = torch.randn(ROWS, IN)
    with mode():
        expected, actual = model(x), fused(x)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(expected, model(x))


def test_a_default_device_is_no_such_mode() -> None:
    fused = epigemm.fuse(relu_layer())
    with torch.device("cpu"), fusion.watch() as unfused:
        fused(torch.randn(ROWS, IN))
    assert unfused == []


class Tagged(Tensor):
    """A subclass that doubles what a relu gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 2 if func in (F.relu, torch.relu) else result


@pytest.mark.parametrize("where", ["x", "weight", "bias"])
def test_subclasses(where: str) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w, b))

    arguments = {"x": torch.randn(ROWS, IN), "weight": torch.randn(OUT, IN), "bias": torch.randn(OUT)}
    fused, report = by_fx(function, list(arguments.values()))
    assert functions(report) == ("linear_relu",)
    arguments[where] = arguments[where].as_subclass(Tagged)
    actual, expected = fused(*arguments.values()), function(*arguments.values())
    assert type(actual) is type(expected) is Tagged
    torch.testing.assert_close(actual, expected)


def test_sparse_tensors() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w.t()).relu()

    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    fused, report = by_fx(function, [x, weight])
    assert functions(report) == ("linear_relu",)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        torch.testing.assert_close(fused(sparse, weight), function(sparse, weight))


@pytest.mark.parametrize("layout", ["strided", "expanded", "transposed", "offset"])
def test_layouts(layout: str) -> None:
    def make(rows: int, columns: int) -> Tensor:
        full = torch.randn(2 * rows, 2 * columns)
        return {
            "strided": full[::2, ::2],
            "expanded": full[:1, :columns].expand(rows, columns),
            "transposed": torch.randn(columns, rows).t(),
            "offset": full[rows:, columns:],
        }[layout]

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(x, w, v) * v

    arguments = [make(ROWS, IN), make(OUT, IN), make(ROWS, OUT)[0]]
    fused, report = by_fx(function, arguments)
    assert functions(report) == ("linear_scale",)
    actual, expected = fused(*arguments), function(*arguments)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def _relu_of_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu()


# --- packs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sites say about packs, call by call."""
    seen: list[str] = []
    linear = call.linear

    def spy(*args: Any) -> Any:
        seen.append(args[-1])
        return linear(*args)

    monkeypatch.setattr(call, "linear", spy)
    return seen


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.clone], ids=["parameter", "tensor"])
@pytest.mark.parametrize("other", [nn.Parameter, torch.Tensor.clone], ids=["parameter", "tensor"])
def test_packs_are_kept_of_parameters_and_on_demand(
    keep: bool, kind: Any, other: Any, uses: list[str]
) -> None:
    """Writes through `.data` (target networks, averages) would leave a kept one stale."""
    torch._dynamo.reset()
    options: Any = {"backend": "eager", "keep_packs": keep}
    compiled: Any = torch.compile(_relu_of_linear, backend="epigemm", options=options)
    # Whatever it was compiled for first.
    compiled(torch.randn(ROWS, IN), other(torch.randn(OUT, IN)))
    uses.clear()
    compiled(torch.randn(ROWS, IN), kind(torch.randn(OUT, IN)))
    assert uses == [packs.KEEP if keep and kind is nn.Parameter else packs.FIND]


def test_fused_models_keep_none(uses: list[str]) -> None:
    """`epigemm.keep_packs` is for plain calls: a model is asked when it is fused."""
    fused = epigemm.fuse(relu_layer())
    fused(torch.randn(ROWS, IN))
    with epigemm.keep_packs():
        fused(torch.randn(ROWS, IN))
    assert uses == [packs.FIND] * 2


def test_distributed_tensors() -> None:
    """They are moved and reduced by their own operators."""
    distributed: Any = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without")
    from torch.distributed.tensor import Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = torch.randn(ROWS, IN)
        model = relu_layer()
        expected = model(x)
        for layer in (model[0],):
            for name, parameter in layer.named_parameters():
                placed = distribute_tensor(parameter.detach(), mesh, [Replicate()])
                setattr(layer, name, nn.Parameter(placed))
        actual: Any = epigemm.fuse(model)(distribute_tensor(x, mesh, [Replicate()]))
        torch.testing.assert_close(actual.full_tensor(), expected)
    finally:
        distributed.destroy_process_group()
