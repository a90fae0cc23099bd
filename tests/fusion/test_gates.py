"""Two products of one x of which one chain reads the other: one call, with the kernel of an H200 that is described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.calls import one_kernel, resolve
from epigemm.epilogues.kinds import MATRIX
from epigemm.fusion import FusionReport, profit
from epigemm.fusion.formula import ChainFormula, ChainStep, Composed, Slot
from epigemm.linker import loader
from epigemm.planner import plans
from tests.fusion.eager import fuse_eagerly
from tests.gemm.query import H200

M, N, K = 1024, 512, 128
_PAIR = one_kernel.pair
ONE = "computed by one kernel with "


class Layers(nn.Module):
    """Two layers of one x, and another of the first one's columns."""

    def __init__(self, bias: tuple[bool, bool], forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(K, N, bias[0]), nn.Linear(K, N, bias[1])
        self.residual = nn.Buffer(torch.randn(M, N))
        self.row, self.wide = nn.Buffer(torch.randn(1, N)), nn.Buffer(torch.randn(N, 2 * K) / 8)
        self._function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def swiglu(self: Any, x: Tensor) -> Tensor:
    result: Tensor = F.silu(self.w1(x)) * self.w3(x)
    return result


def second_is_activated(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.w1(x) * F.gelu(self.w3(x))
    return result


def with_a_residual(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.residual + F.silu(self.w1(x)) * self.w3(x)
    return result


def read_twice(self: Any, x: Tensor) -> Tensor:
    gate = self.w3(x)
    result: Tensor = torch.sigmoid(self.w1(x)) * gate + gate
    return result


def of_another_x(self: Any, x: Tensor) -> Tensor:
    result: Tensor = F.silu(self.w1(x)) * self.w3(x + 1)
    return result


def both_activated(self: Any, x: Tensor) -> Tensor:
    result: Tensor = F.silu(self.w1(x)) * F.relu(self.w3(x))
    return result


def read_outside(self: Any, x: Tensor) -> Tensor:
    gate = self.w3(x)
    result: Tensor = (F.silu(self.w1(x)) * gate).mean(-1, keepdim=True) + gate
    return result


def written_between(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    gate = self.w3(x)
    x.mul_(2)
    result: Tensor = F.silu(self.w1(x)) * gate
    return result


def another_matrix_first(self: Any, x: Tensor) -> Tensor:
    result: Tensor = (F.silu(self.w1(x)) + self.residual) * self.w3(x)
    return result


def a_row_of_two_axes(self: Any, x: Tensor) -> Tensor:
    """The kernel reads rows of one axis."""
    result: Tensor = F.silu(self.w1(x)) * (self.w3(x) + self.row)
    return result


def weights_of_other_strides(self: Any, x: Tensor) -> Tensor:
    result: Tensor = F.silu(self.w1(x)) * F.linear(x, self.wide[:, :K])
    return result


JOINED = [swiglu, second_is_activated, with_a_residual, read_twice, both_activated]
APART = [
    of_another_x,
    read_outside,
    written_between,
    another_matrix_first,
    a_row_of_two_axes,
    weights_of_other_strides,
]
BIASES = [(False, False), (True, True), (False, True), (True, False)]
biases = pytest.mark.parametrize("bias", BIASES, ids=str)
by_name: dict[str, Any] = {"ids": lambda each: each.__name__}


class Kernel:
    """In place of the kernel of a pair: float64, by the epilogue's reference."""

    def __init__(self) -> None:
        self.calls = 0
        self.runs = True

    def __call__(self, call: LinearCall) -> Tensor | None:
        if not self.runs:
            return None
        self.calls += 1
        place = next(i for i, each in enumerate(call.epilogue.operands) if each.kind == MATRIX)
        x, weight = call.x.double(), call.weight.double()
        operands = [each.double() if isinstance(each, Tensor) else each for each in call.operands]
        assert operands[place] is None and call.weight2 is not None
        operands[place] = x @ call.weight2.double().t()
        return call.epilogue.reference(x @ weight.t(), operands).to(call.x.dtype)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """CPU tensors count as lying on an H200."""
    made = Kernel()
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    monkeypatch.setattr(profit, "place_of", lambda chain: torch.empty(0))
    monkeypatch.setattr(loader, "would_link", lambda *call: "")
    monkeypatch.setattr(one_kernel, "pair", made)
    return made


def fused(
    forward: Callable[[Any, Tensor], Tensor], bias: tuple[bool, bool] = (True, True), **options: Any
) -> tuple[Any, Any, FusionReport]:
    torch.manual_seed(3)
    model = Layers(bias, forward).to(torch.bfloat16).eval().requires_grad_(False)
    made: Any = fuse_eagerly(model, **options)
    return made, model, made.fusion_report


def check(made: Any, model: Any, x: Tensor) -> None:
    """Against float64: the second product is not rounded."""
    exact = model.double()
    expected = exact(x.double())
    model.to(torch.bfloat16)
    torch.testing.assert_close(made(x).double(), expected, rtol=2e-2, atol=2e-2)


@biases
@pytest.mark.parametrize("forward", JOINED, **by_name)
def test_one_call(forward: Callable[..., Tensor], bias: tuple[bool, bool], kernel: Kernel) -> None:
    made, model, report = fused(forward, bias)
    x = torch.randn(M, K).to(torch.bfloat16)
    check(made, model, x)
    assert kernel.calls == 1 and len(report.sites) == 2
    assert sorted(note for site in report.sites for note in site.notes if ONE in note) == [
        f"{ONE}w1",
        f"{ONE}w3",
    ]


@pytest.mark.parametrize("forward", APART, **by_name)
def test_two_calls(forward: Callable[..., Tensor], kernel: Kernel) -> None:
    made, model, report = fused(forward)
    check(made, model, torch.randn(M, K).to(torch.bfloat16))
    assert not kernel.calls and not any(ONE in note for site in report.sites for note in site.notes)


def test_two_calls_where_the_kernel_does_not_run(kernel: Kernel) -> None:
    """As at a call's other sizes, or within a mode."""
    kernel.runs = False
    for forward in JOINED:
        made, model, _ = fused(forward)
        check(made, model, torch.randn(M, K).to(torch.bfloat16))
    assert not kernel.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_16_bits_alone(dtype: torch.dtype, kernel: Kernel) -> None:
    model = Layers((True, True), swiglu).to(dtype).eval().requires_grad_(False)
    made: Any = fuse_eagerly(model)
    x = torch.randn(M, K, dtype=dtype)
    torch.testing.assert_close(made(x), model(x))
    assert not kernel.calls


def test_not_where_autograd_records(kernel: Kernel) -> None:
    model = Layers((True, True), swiglu).to(torch.bfloat16)
    made: Any = fuse_eagerly(model)
    made(torch.randn(M, K).to(torch.bfloat16)).sum().backward()
    assert not kernel.calls


def test_not_where_an_operand_needs_a_gradient(kernel: Kernel) -> None:
    made, model, _ = fused(with_a_residual)
    for each in (made, model):
        each.residual.requires_grad_()
    made(torch.randn(M, K).to(torch.bfloat16)).sum().backward()
    assert not kernel.calls and made.residual.grad is not None
    assert not any(ONE in note for site in made.fusion_report.sites for note in site.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_where_nothing_is_cast(dtype: torch.dtype, kernel: Kernel) -> None:
    model = Layers((True, True), swiglu).to(dtype).eval().requires_grad_(False)
    made: Any = fuse_eagerly(model)
    x = torch.randn(M, K).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(made(x), model(x), rtol=3e-2, atol=3e-2)
    assert kernel.calls == (dtype is torch.bfloat16)
    noted = any(ONE in note for site in made.fusion_report.sites for note in site.notes)
    assert noted == (dtype is torch.bfloat16)


def test_two_calls_where_a_compiler_traces_the_graph(kernel: Kernel) -> None:
    model = Layers((True, True), swiglu).to(torch.bfloat16).eval().requires_grad_(False)
    report = FusionReport()
    options: Any = {"backend": "aot_eager", "report": report.add}
    made: Any = torch.compile(model, backend="epigemm", fullgraph=True, options=options)
    check(made, model, torch.randn(M, K).to(torch.bfloat16))
    assert not kernel.calls and not any(ONE in note for site in report.sites for note in site.notes)


def test_not_at_few_rows(kernel: Kernel) -> None:
    """The planner expects two calls to be faster there."""
    made, model, _ = fused(swiglu)
    check(made, model, torch.randn(4, K).to(torch.bfloat16))
    assert not kernel.calls


def test_the_halves_of_one_product(kernel: Kernel) -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(K, 2 * N)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.fc(x).chunk(2, -1)
            result: Tensor = F.silu(first) * second
            return result

    model = Chunked().to(torch.bfloat16).eval().requires_grad_(False)
    made: Any = fuse_eagerly(model)
    check(made, model, torch.randn(M, K).to(torch.bfloat16))
    assert kernel.calls == 1


@pytest.mark.parametrize("forward", JOINED, **by_name)
def test_explained_as_one(forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel, "pair", _PAIR)
    monkeypatch.setattr(resolve._Linear, "run", lambda self: self.call.new_out().zero_())
    made, _, _ = fused(forward)
    lead = (M,) if forward is with_a_residual else (2, M // 2)
    found = epigemm.explain(made, torch.randn(*lead, K).to(torch.bfloat16))
    (product,) = found.products
    assert product.explanation is not None
    assert "one kernel multiplies x by both weights" in " ".join(product.explanation.reasons)


def test_a_formula_of_an_operand_of_another() -> None:
    steps = (ChainStep(torch.relu, (Slot(0),)), ChainStep(torch.mul, (Slot(1), Slot(-2))))
    first = ChainFormula(("per_row", "matrix"), steps)
    added = ChainStep(torch.add, (Slot(0), Slot(-1)))
    second = ChainFormula(("per_column",), (added, ChainStep(torch.sigmoid, (Slot(1),))))
    both = Composed(first, 1, second)
    assert both.kinds == ("per_column", "per_row", "matrix")
    acc, bias, row, gate = torch.randn(3, 4), torch.randn(4), torch.randn(3, 1), torch.randn(3, 4)
    expected = torch.relu(acc) * torch.sigmoid(gate + bias)
    torch.testing.assert_close(both(acc, bias, row, gate), expected)
    alone = Composed(first, 1, ChainFormula((), ()))
    torch.testing.assert_close(alone(acc, row, gate), torch.relu(acc) * gate)
