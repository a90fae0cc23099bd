"""Two products of one x of which one chain reads the other: one call, with the kernel of an H200 that is described."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.support.pieces import DEVICE
from tests.support.pretended import H200, Pretended, pretend_gpu
from tests.support.thorough import in_turn

M, N, K = 1024, 512, 128
ONE = "computed by one kernel with "

# Of the layers w1 and w3, a residual `[M, N]`, a row `[1, N]` and a weight of other strides.
JOINED = [
    "F.silu(w1(x)) * w3(x)",
    "w1(x) * F.gelu(w3(x))",
    "residual + F.silu(w1(x)) * w3(x)",
    "(lambda gate: torch.sigmoid(w1(x)) * gate + gate)(w3(x))",
    "F.silu(w1(x)) * F.relu(w3(x))",
    "(lambda halves: F.silu(halves[0]) * halves[1])(both(x).chunk(2, -1))",
]
APART = [
    "F.silu(w1(x)) * w3(x + 1)",
    "(lambda gate: (F.silu(w1(x)) * gate).mean(-1, keepdim=True) + gate)(w3(x))",
    "(lambda z: (lambda gate: F.silu(w1(z.mul_(2))) * gate)(w3(z)))(x.clone())",
    "(F.silu(w1(x)) + residual) * w3(x)",
    "F.silu(w1(x)) * (w3(x) + row)",
    "F.silu(w1(x)) * F.linear(x, wide[:, :128])",
]


class Layers(nn.Module):
    """Two layers of one x, both in one, and what else the functions read."""

    def __init__(self, text: str, bias: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(K, N, bias[0]), nn.Linear(K, N, bias[1])
        self.both = nn.Linear(K, 2 * N)
        self.residual = nn.Buffer(torch.randn(M, N))
        self.row, self.wide = nn.Buffer(torch.randn(1, N)), nn.Buffer(torch.randn(N, 2 * K) / 8)
        names = "w1, w3, both, residual, row, wide"
        self._function = eval(f"lambda x, {names}: {text}", {"torch": torch, "F": nn.functional})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._function(x, self.w1, self.w3, self.both, self.residual, self.row, self.wide)
        return result


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, hopper: Tensor) -> Pretended:
    """CPU tensors count as lying on an H200."""
    made = Pretended()
    pretend_gpu(monkeypatch, DEVICE, made, gpu=H200)
    return made


def model_of(text: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Layers:
    torch.manual_seed(3)
    return Layers(text, **settings).to(dtype).eval().requires_grad_(False)


def check(made: Any, model: Any, *, rows: int = M) -> None:
    """Values near float64's: the second product is not rounded."""
    x = torch.randn(rows, K).to(model.w1.weight.dtype)
    expected = model.double()(x.double())
    model.to(x.dtype)
    torch.testing.assert_close(made(x).double(), expected, rtol=2e-2, atol=2e-2)


def said(report: FusionReport) -> list[str]:
    return sorted(note for site in report.sites for note in site.notes if ONE in note)


@pytest.mark.parametrize(
    ("text", "bias"), in_turn(JOINED, [(False, False), (True, True), (False, True), (True, False)]), ids=str
)
def test_one_call(text: str, bias: tuple[bool, bool], gpu: Pretended) -> None:
    model = model_of(text, bias=bias)
    made = fuse_eagerly(model)
    check(made, model)
    assert gpu.pairs == 1 and len(said(made.fusion_report)) == 2
    if "both" not in text:
        assert said(made.fusion_report) == [f"{ONE}w1", f"{ONE}w3"]
    with epigemm.batch_invariant():
        check(made, model)
    assert gpu.pairs == 1


@pytest.mark.parametrize("text", APART)
def test_two_calls(text: str, gpu: Pretended) -> None:
    model = model_of(text)
    made = fuse_eagerly(model)
    check(made, model)
    assert not gpu.pairs and not said(made.fusion_report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits_alone(dtype: torch.dtype, autocast: bool, gpu: Pretended) -> None:
    """And where nothing is cast."""
    model = model_of(JOINED[0], dtype)
    made, x = fuse_eagerly(model), torch.randn(M, K).to(dtype)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        torch.testing.assert_close(made(x), model(x), rtol=3e-2, atol=3e-2)
    is_short = dtype is torch.bfloat16
    assert bool(gpu.pairs) == bool(said(made.fusion_report)) == is_short


@pytest.mark.parametrize("learning", ["w1.weight", "residual"])
def test_not_where_gradients_are_recorded(learning: str, gpu: Pretended) -> None:
    model = model_of(JOINED[2])
    made = fuse_eagerly(model)
    for each in (made, model):
        attribute = each.residual if learning == "residual" else each.w1.weight
        attribute.requires_grad_()
    made(torch.randn(M, K).to(torch.bfloat16)).sum().backward()
    assert not gpu.pairs and not said(made.fusion_report) and attribute.grad is not None


def test_not_where_a_compiler_traces_the_graph(gpu: Pretended) -> None:
    model, report = model_of(JOINED[0]), FusionReport()
    options: Any = {"backend": "aot_eager", "report": report.add}
    check(torch.compile(model, backend="epigemm", fullgraph=True, options=options), model)
    assert not gpu.pairs and not said(report)


def test_not_at_few_rows(gpu: Pretended) -> None:
    """The planner expects two calls to be faster there."""
    model = model_of(JOINED[0])
    check(fuse_eagerly(model), model, rows=4)
    assert not gpu.pairs


@pytest.mark.parametrize("text", JOINED)
def test_explained_as_one(text: str) -> None:
    lead = (M,) if "residual" in text else (2, M // 2)
    found = epigemm.explain(fuse_eagerly(model_of(text)), torch.randn(*lead, K).to(torch.bfloat16))
    (product,) = found.products
    assert product.explanation is not None
    assert "one kernel multiplies x by both weights" in " ".join(product.explanation.reasons)
