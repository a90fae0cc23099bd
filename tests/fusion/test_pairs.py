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
from epigemm.fusion.profit import Judged
from tests.fusion.eager import fuse_eagerly, graph_of, report_of

ROWS, K, N = 6, 8, 10


class Layers(nn.Module):
    """One gated layer of two halves, and one behind it."""

    def __init__(self, k: int = K, n: int = N, last: int = N) -> None:
        super().__init__()
        self.fc, self.down = nn.Linear(k, 2 * n), nn.Linear(n, 2 * last)

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


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    a, b = F.linear(x, weight).chunk(2, -1)
    return F.silu(a) * b


def judged(graph: fx.Graph, judge: Callable[[Chain], Judged]) -> dict[Chain, Judged]:
    finder, understood = ChainFinder(graph), map(matmuls.understand, reversed(list(graph.nodes)))
    chains = [finder.chain(each) for each in understood if isinstance(each, matmuls.Product)]
    return {chain: judge(chain) for chain in chains}


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
    with torch.no_grad():
        graph = graph_of(swiglu, torch.empty(m, k, dtype=dtype), torch.empty(2 * n, k, dtype=dtype))

    def judge(chain: Chain) -> Judged:
        return profit.judged_there(profit.call_of(chain), hopper)

    us = pairs.times(judged(graph, judge))
    (pair,) = pairs.take_apart(graph, us, us).values()
    assert pairs.pays(pair, judged(graph, judge), one_by_one=True) == pays


@pytest.mark.parametrize("sizes", [(3072, 16), (16, 3072)], ids=str)
def test_only_those_that_pay(sizes: tuple[int, int], hopper: Tensor) -> None:
    """The other one stays as it was; one whose x is what another one gave, too."""
    model = Layers(1024, *sizes).bfloat16()
    x = torch.empty(4096, 1024, dtype=torch.bfloat16)
    with torch.no_grad():
        report = fuse_eagerly(model, dry_run=True, example_inputs=[x])
    kept = "fc" if sizes[0] > sizes[1] else "down"
    assert [note.partition(":")[0] for note in report.notes] == [kept], report


def test_one_product_stays_where_views_read_what_is_computed_later(hopper: Tensor) -> None:
    """A size of a dynamic batch, behind the product. Of few rows two products take longer than one."""

    class Later(Layers):
        def forward(self, x: Tensor) -> Any:
            z = self.fc(x.view(-1, K))
            size = x.shape[0] * x.shape[1]
            a, b = z.view(size, 2, N).unbind(1)
            return self.down(F.silu(a) * b * z[:, :N])

    model, report = Later(), FusionReport()
    options: Any = {"backend": "aot_eager", "report": report.add, "strict": True}
    call = torch.compile(model, backend="epigemm", dynamic=True, options=options)
    with torch.no_grad():
        for lead in ((2, 3), (4, 5)):
            x = torch.randn(*lead, K)
            torch.testing.assert_close(call(x), model(x))
    assert not report.notes, report
