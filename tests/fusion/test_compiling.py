"""Programs that torch.compile takes with the backend "epigemm": dynamic shapes, breaks, training, nesting, caches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.support.untyped import backward

IN, OUT = 12, 8
CHAINS = ["linear_relu", "linear_sigmoid_mul_add"]


def compiled(function: Any, reports: list[FusionReport], *, backend: Any = "aot_eager", **given: Any) -> Any:
    settings: dict[str, Any] = {"report": reports.append, "backend": backend}
    return torch.compile(function, backend="epigemm", options=settings, **given)


def count(reports: list[FusionReport]) -> list[str]:
    """The chains in all graphs."""
    return sorted(site.function for report in reports for site in report.sites if site.function != "linear")


class Block(nn.Module):
    """Two chains, with the features of Python's that programs have around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        self.dropout = nn.Dropout(0.5)

    def tail(self, h: Tensor) -> Tensor:
        z: Tensor = self.last(h)
        return z + 2 * torch.sigmoid(z)


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.relu(self.first(x)))


class Random(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.dropout(torch.relu(self.first(x))) + torch.rand_like(x[:, :OUT]))


class Choosing(Block):
    """Looks at values: the graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return h if h.sum() > 1e9 else self.tail(h)


@pytest.mark.parametrize("kind", [Plain, Random, Choosing])
def test_training(kind: Callable[[], Block]) -> None:
    """Whole or in several graphs: values, random numbers, gradients, with writes behind torch's back between them."""
    model = kind()
    plain, reports = copy.deepcopy(model), list[FusionReport]()
    fast = compiled(model, reports)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, plain)]
    for step in range(3):
        x, outputs = torch.randn(5, IN), []
        for each, m, optimizer in zip((fast, plain), (model, plain), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            outputs.append(each(x))
            backward(outputs[-1].square().sum())
            optimizer.step()
            m.first.weight.data.mul_(1 + 0.1 * step)
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)
    assert set(count(reports)) >= {CHAINS[1]} and len(count(reports)) == 2


@pytest.mark.parametrize("how", ["dynamic", "marked", "seen"])
@pytest.mark.parametrize("learns", [False, True])
def test_many_batches(how: str, learns: bool) -> None:
    """One graph for all, or two where the first call's was taken for the only one."""
    model, reports = Plain(), list[FusionReport]()
    fast = compiled(model, reports, fullgraph=True, dynamic=True if how == "dynamic" else None)
    for rows in (5, 7, 64, 33):
        x = torch.randn(rows, IN)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(reports) == (2 if how == "seen" else 1)
    assert all(count([r]) == CHAINS for r in reports)


@pytest.mark.parametrize("inner", ["compiled", "fused", "disabled"])
def test_nesting(inner: str) -> None:
    """A compiled or fused module inside of a compiled one."""
    blocks = [Plain(), Plain()]
    plain = copy.deepcopy(blocks)
    wrapped: Any = {
        "compiled": lambda: compiled(blocks[0], []),
        "fused": lambda: fuse_eagerly(blocks[0]),
        "disabled": lambda: torch._dynamo.disable(blocks[0]),  # type: ignore[no-untyped-call]
    }[inner]()
    reports: list[FusionReport] = []
    fast, x = compiled(lambda x: blocks[1](wrapped(x)).relu(), reports), torch.randn(5, IN)
    for _ in range(2):
        torch.testing.assert_close(fast(x), plain[1](plain[0](x)).relu(), rtol=1e-4, atol=1e-4)
    assert any(name.startswith("linear_sigmoid_mul_add") for name in count(reports))


# --- Inductor ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "reduce-overhead"},
        *({"options": each} for each in ({"max_autotune": False}, {"freezing": True}, {"cpp_wrapper": True})),
    ],
    ids=str,
)
def test_inductor_compiles_the_rest(settings: dict[str, Any]) -> None:
    """With its options and modes."""
    model, x = Plain().eval(), torch.randn(5, IN)
    plain = copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, **settings)
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductor_trains() -> None:
    """A graph that is traced again, as Inductor has Dynamo do for a number that changes, is reported once."""
    model, reports = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.LayerNorm(OUT)), list[FusionReport]()
    options: dict[str, Any] = {"report": reports.append}
    fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, dynamic=True, options=options)
    x, upstream = torch.randn(5, IN), torch.randn(5, OUT)
    found = [torch.autograd.grad(each(x), [*model.parameters()], upstream) for each in (fast, model)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert [len(report.sites) for report in reports] == [1]


@pytest.mark.slow
def test_caches_on_disk_know_what_was_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal but for one number: neither gets the other's graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, layer = torch.randn(5, IN), nn.Linear(IN, OUT)
    for divisor in (2.0, 5.0):
        torch._dynamo.reset()
        counters.clear()

        def function(x: Tensor, divisor: float = divisor) -> Tensor:
            return (torch.relu(layer(x)) / divisor).sin()

        fast: Any = torch.compile(function, backend="epigemm", fullgraph=True, dynamic=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-4)
        assert (
            counters["aot_autograd"]["autograd_cache_hit"] == counters["inductor"]["fxgraph_cache_hit"] == 0
        )
