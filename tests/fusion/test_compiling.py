"""Programs that torch.compile takes with the backend "epigemm": dynamic shapes, breaks, training, nesting, caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.support.untyped import backward

IN, OUT = 12, 8


def compiled(function: Any, reports: list[FusionReport], **options: Any) -> Any:
    settings: dict[str, Any] = {"report": reports.append, "backend": "aot_eager"}
    return torch.compile(function, backend="epigemm", options=settings, **options)


class Block(nn.Module):
    """Two chains, with the features of Python's that programs have around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        self.dropout = nn.Dropout(0.5)
        self.calls: list[str] = []

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
        if h.sum() > 1e9:
            return h
        return self.tail(h)


class Printing(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        print("between")
        return self.tail(h)


class Structured(Block):
    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0, **others: Tensor) -> dict[str, Any]:
        h = torch.relu(self.first(batch["x"])) / 2.0
        return {"out": self.tail(h) * scale, "parts": [h, others["bias"]]}


def functions(report: FusionReport) -> tuple[str, ...]:
    return tuple(site.function for site in report.sites if site.function != "linear")


def count(reports: list[FusionReport]) -> list[str]:
    return sorted(name for report in reports for name in functions(report))


@pytest.mark.parametrize("kind", [Plain, Random, Choosing, Printing])
@pytest.mark.parametrize("training", [False, True])
def test_programs(kind: Callable[[], Block], training: bool) -> None:
    """Whole or in several graphs: both chains are fused, values, random numbers and gradients are the same."""
    model = kind().train(training)
    plain, reports = copy.deepcopy(model), list[FusionReport]()
    fast = compiled(model, reports)
    for rows in (5, 5):
        x, upstream = torch.randn(rows, IN), torch.randn(rows, IN)
        outputs = []
        for each in (fast, plain):
            torch.manual_seed(rows)
            outputs.append(each(x))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        for output in outputs:
            backward(output, upstream)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert len(count(reports)) == 2 and "linear_sigmoid_mul_add" in count(reports)


def test_structured_arguments() -> None:
    model = Structured()
    reports: list[FusionReport] = []
    fast = compiled(model, reports, fullgraph=True)
    batch, bias = {"x": torch.randn(5, IN), "unused": torch.randn(1)}, torch.randn(3)
    for scale in (1.0, 2.5):
        actual, expected = fast(batch, scale=scale, bias=bias), model(batch, scale=scale, bias=bias)
        torch.testing.assert_close(actual["out"], expected["out"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual["parts"], expected["parts"], rtol=1e-5, atol=1e-5)
    assert {"linear_relu_truediv"} < set(count(reports))


@pytest.mark.parametrize("how", ["dynamic", "marked", "seen"])
@pytest.mark.parametrize("learns", [False, True])
def test_many_batches(how: str, learns: bool) -> None:
    """One graph for all, or two where the first call's was taken for the only one."""
    model = Plain()
    reports: list[FusionReport] = []
    fast = compiled(model, reports, fullgraph=True, dynamic=True if how == "dynamic" else None)
    for rows in (5, 7, 64, 33, 128, 6):
        x = torch.randn(rows, IN)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(reports) == (2 if how == "seen" else 1)
    assert all(count([r]) == ["linear_relu", "linear_sigmoid_mul_add"] for r in reports)


def test_a_symbol_is_no_number() -> None:
    """A divisor that is the batch's size."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w)) / x.shape[0]

    reports: list[FusionReport] = []
    fast = compiled(function, reports, fullgraph=True, dynamic=True)
    weight = torch.randn(OUT, IN)
    for rows in (5, 7, 9):
        x = torch.randn(rows, IN)
        torch.testing.assert_close(fast(x, weight), function(x, weight), rtol=1e-5, atol=1e-5)
    assert [functions(report) for report in reports] == [("linear_relu",)]


def test_calls_in_other_modes() -> None:
    """Types, autocast, no_grad, inference mode: each has a graph of its own."""
    model = Plain()
    fast = compiled(model, [], fullgraph=True)
    x = torch.randn(5, IN)
    for mode in (
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        with mode:
            actual, expected = fast(x), model(x)
        assert actual.dtype is expected.dtype and actual.requires_grad == expected.requires_grad
        assert actual.is_inference() == expected.is_inference()
        tolerance = 1e-5 if actual.dtype is torch.float32 else 0.05
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    model.to(torch.float64)
    torch.testing.assert_close(fast(x.double()), model(x.double()))


def test_a_negative_base() -> None:
    """The code of torch's own graphs would be `-2.0 ** z`."""
    layer, x = nn.Linear(IN, OUT), torch.randn(5, IN)

    def function(x: Tensor) -> Any:
        return (-2.0) ** torch.relu(layer(x)).round()

    torch.testing.assert_close(compiled(function, [], fullgraph=True)(x), function(x))


def test_training() -> None:
    """Steps of an optimiser, and weights written behind torch's back between them."""
    model = Plain()
    plain = copy.deepcopy(model)
    fast = compiled(model, [], fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, plain)]
    for step in range(4):
        x = torch.randn(6, IN)
        for each, m, optimizer in zip((fast, plain), (model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each(x).square().sum())
            optimizer.step()
            m.first.weight.data.mul_(1 + 0.1 * step)
            with torch.no_grad():
                m.last.bias.add_(0.1)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-3, atol=1e-4)


def test_tied_and_viewed_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(IN, IN), nn.Linear(IN, IN)
            self.two.weight = self.one.weight
            self.both = nn.Parameter(torch.randn(2 * IN, IN))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.two(torch.relu(self.one(x))))
            return torch.relu(F.linear(h, self.both[IN:])) @ self.one.weight

    model = Tied()
    plain, reports = copy.deepcopy(model), list[FusionReport]()
    fast = compiled(model, reports, fullgraph=True)
    x, upstream = torch.randn(5, IN), torch.randn(5, IN)
    for _ in range(2):
        for each in (fast, plain):
            backward(each(x), upstream)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for m in (model, plain):
                m.one.weight.data.copy_(m.both[:IN])
    assert count(reports) == ["linear_relu"] * 3


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

    def function(x: Tensor) -> Any:
        return blocks[1](wrapped(x)).relu()

    reports: list[FusionReport] = []
    fast = compiled(function, reports)
    x = torch.randn(5, IN)
    for _ in range(2):
        torch.testing.assert_close(fast(x), plain[1](plain[0](x)).relu(), rtol=1e-4, atol=1e-4)
    assert any(name.startswith("linear_sigmoid_mul_add") for name in count(reports))


@pytest.mark.slow
def test_caches_on_disk_know_what_was_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal but for one number: neither gets the other's graph, and an equal one gets its own again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, layer = torch.randn(5, IN), nn.Linear(IN, OUT)
    hits = []
    for divisor in (2.0, 5.0, None, 2.0):
        torch._dynamo.reset()
        counters.clear()

        def function(x: Tensor, divisor: float | None = divisor) -> Tensor:
            h = torch.relu(layer(x))
            return h.sin() if divisor is None else (h / divisor).sin()

        fast: Any = torch.compile(function, backend="epigemm", fullgraph=True, dynamic=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-4)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits[:3] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"freezing": True}, {"cpp_wrapper": True}, {"max_autotune": True}], ids=str
)
def test_inductor_options(settings: dict[str, Any]) -> None:
    model = Plain().eval()
    plain = copy.deepcopy(model)
    x = torch.randn(5, IN)
    with torch.no_grad():
        fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, options=settings)
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductor_trains() -> None:
    model = Random().train()
    model.dropout.p = 0.0
    fast: Any = torch.compile(Plain.forward, backend="epigemm", fullgraph=True)
    plain = copy.deepcopy(model)
    x, upstream = torch.randn(5, IN), torch.randn(5, IN)
    backward(fast(model, x), upstream)
    backward(Plain.forward(plain, x), upstream)  # type: ignore[arg-type]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
