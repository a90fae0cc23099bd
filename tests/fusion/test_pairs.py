"""A product whose halves are multiplied becomes a pair of products where that is faster. Which ones: `table.HALVES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from epigemm.fusion import FusionReport, matmuls, pairs, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.pairs import Pair
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.rewrite import name_of
from tests.fusion.eager import fuse_eagerly, report_of

ROWS, K, N = 6, 8, 10


class Layers(nn.Module):
    """One gated layer of two halves, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.down = nn.Linear(K, 2 * N), nn.Linear(N, 2 * N)

    def forward(self, x: Tensor) -> Any:
        return F.glu(self.down(F.glu(self.fc(x), -1)), -1)


def test_where_gradients_or_casts_make_it_slower() -> None:
    """x's gradient would take two products and a sum; under autocast each of the two would cast x."""
    model = Layers()
    fused = fuse_eagerly(model)
    x = torch.randn(ROWS, K, requires_grad=True)
    torch.testing.assert_close(fused(x), model(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fused(x), fused(x.bfloat16())
    assert not report_of(fused).notes
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), model(x))
    assert len(report_of(fused).notes) == 2, "another graph"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_not_in_an_inference_mode_of_the_models_own(backend: str) -> None:
    """AOTAutograd can trace no view of a parameter there; around the model it does not see the mode."""

    class Within(Layers):
        def forward(self, x: Tensor) -> Any:
            with torch.inference_mode():
                return super().forward(x)

    model, report = Within(), FusionReport()
    options: Any = {"backend": backend, "report": report.add}
    with torch.no_grad():
        x = torch.randn(ROWS, K)
        torch.testing.assert_close(torch.compile(model, backend="epigemm", options=options)(x), model(x))
    assert report.sites and not report.notes, report


# --- what pays -------------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """Of a function of one result, which is not computed."""
    found: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(graph_module.graph)
        return lambda *_: (torch.empty(0),)

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    a, b = F.linear(x, weight).chunk(2, -1)
    return F.silu(a) * b


def of_pytorch(x: Tensor, weight: Tensor) -> Tensor:
    return F.glu(F.linear(x, weight), -1)


def judged(graph: fx.Graph, judge: Callable[[Chain], Judged]) -> dict[Chain, Judged]:
    finder, understood = ChainFinder(graph), map(matmuls.understand, reversed(list(graph.nodes)))
    chains = [finder.chain(each) for each in understood if isinstance(each, matmuls.Product)]
    return {chain: judge(chain) for chain in chains}


def taken_apart(graph: fx.Graph, one_us: float) -> Pair:
    one = judged(graph, lambda chain: Judged(profit.SLOWER, Way.FALLBACK, one_us, one_us))
    us = pairs.read_by_halves(graph, one)
    (pair,) = pairs.take_apart(graph, us, us).values()
    return pair


SIZES = torch.empty(4096, 64), torch.empty(2 * 2048, 64)
MOVED_US = 4096 * 2048 * 4 / 3e6  # a matrix of the result's size in fp32
WHOLE_US = 1000.0 + 2 * 3.0 + 5 * MOVED_US


@pytest.mark.parametrize("one_by_one", [True, False], ids=["eager", "Inductor"])
@pytest.mark.parametrize("function", [swiglu, of_pytorch])
def test_the_kernels_behind_are_counted(function: Callable[..., Any], one_by_one: bool) -> None:
    """In eager mode SiLU and a product, or `F.glu`; Inductor makes one kernel of both."""
    graph = graph_of(function, *SIZES)
    pair = taken_apart(graph, 1000.0)
    passes, kernels = (5, 2) if function is swiglu and one_by_one else (3, 1)
    whole_us = 1000.0 + kernels * 3.0 + passes * MOVED_US
    for share, pays in ((0.48, True), (0.49, False)):
        found = judged(graph, lambda chain, us=share * whole_us: Judged("", Way.FUSED, 2000.0, us))  # type: ignore[misc]
        assert pairs.pays(pair, found, one_by_one=one_by_one) == pays


@pytest.mark.parametrize("both", ["", "of both"])
def test_each_part_is_counted_once(both: str) -> None:
    """A chain that is not fused by its kernels; one kernel for both products in full, with the operators of one."""
    graph = graph_of(swiglu, *SIZES)
    pair, silu_us = taken_apart(graph, 1000.0), 3.0 + 2 * MOVED_US

    def judge(chain: Chain, us: float) -> Judged:
        is_last = chain.function == "linear_mul"
        if both:
            return Judged("", Way.FUSED, 500.0, us if is_last else 0.0, both=both)
        left_us = us - 500.0 - silu_us
        return (
            Judged("", Way.FUSED, 500.0, 500.0)
            if is_last
            else Judged(profit.SLOWER, Way.FALLBACK, left_us, left_us)
        )

    for share, pays in ((0.96, True), (0.98, False)):
        found = judged(graph, lambda chain, us=share * WHOLE_US: judge(chain, us))  # type: ignore[misc]
        assert pairs.pays(pair, found, one_by_one=True) == pays
    nothing = judged(graph, lambda chain: Judged(profit.SLOWER, Way.FALLBACK, 1.0, 1.0))
    assert not pairs.pays(pair, nothing, one_by_one=True)


@pytest.mark.parametrize(
    ("dtype", "size", "pays"),
    [
        (torch.bfloat16, (4096, 3072, 1024), True),
        (torch.bfloat16, (16, 2816, 1024), False),
        (torch.float32, (4096, 3072, 1024), True),
        (torch.float32, (64, 1024, 256), False),
    ],
)
def test_the_planner_decides(
    dtype: torch.dtype, size: tuple[int, int, int], pays: bool, hopper: Tensor
) -> None:
    """On an H200 that is described to it: at few rows two products take longer than one."""
    m, n, k = size
    graph = graph_of(swiglu, torch.empty(m, k, dtype=dtype), torch.empty(2 * n, k, dtype=dtype))

    def judge(chain: Chain) -> Judged:
        return profit.judged_there(profit.call_of(chain), hopper)

    us = pairs.read_by_halves(graph, judged(graph, judge))
    (pair,) = pairs.take_apart(graph, us, us).values()
    assert pairs.pays(pair, judged(graph, judge), one_by_one=True) == pays


def test_only_those_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one stays as it was; one whose x is what another one gave, too."""
    for lost, kept in (("fc", "down"), ("down", "fc")):
        monkeypatch.setattr(pairs, "pays", lambda pair, *_, lost=lost, **__: name_of(pair.first) != lost)
        model, x = Layers(), torch.randn(ROWS, K)
        fused = fuse_eagerly(model)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x))
        assert len(report_of(fused).sites) == 3
        assert [note.partition(":")[0] for note in report_of(fused).notes] == [kept]


def test_one_product_stays_where_views_read_what_is_computed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of a dynamic batch, behind the product."""

    class Later(Layers):
        def forward(self, x: Tensor) -> Any:
            z = self.fc(x.view(-1, K))
            size = x.shape[0] * x.shape[1]
            a, b = z.view(size, 2, N).unbind(1)
            return self.down(F.silu(a) * b * z[:, :N])

    monkeypatch.setattr(pairs, "pays", lambda *_, **__: False)
    model, report = Later(), FusionReport()
    options: Any = {"backend": "aot_eager", "report": report.add}
    call = torch.compile(model, backend="epigemm", dynamic=True, options=options)
    with torch.no_grad():
        for lead in ((2, 3), (4, 5)):
            x = torch.randn(*lead, K)
            torch.testing.assert_close(call(x), model(x))
    assert len(report.sites) == 2 and not report.skipped and not report.notes, report
