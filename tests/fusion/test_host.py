"""Whether the GPU waits for the host in a graph, and for which sizes a decision holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import epigemm
from epigemm.fusion import costs, host, matmuls, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.host import Launches
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.values import hint
from epigemm.planning import plans

LONG, BRIEF = 1000.0, 1.0  # microseconds of a product


def chains_of(function: Callable[[Tensor], Any], x: Tensor) -> tuple[fx.Graph, list[Chain]]:
    found: list[tuple[fx.Graph, list[Chain]]] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        finder = ChainFinder(graph_module.graph)
        understood = map(matmuls.understand, reversed(list(graph_module.graph.nodes)))
        chains = [finder.chain(each) for each in understood if isinstance(each, matmuls.Product)]
        found.append((graph_module.graph, chains))
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True)(x)
    return found[0]


WEIGHT, BIAS = torch.rand(8, 8), torch.rand(8)


def one_kernel_behind(x: Tensor) -> Tensor:
    for _ in range(4):
        x = F.gelu(F.linear(x, WEIGHT, BIAS)).view(6, 8)
    return x


def nothing_behind(x: Tensor) -> Tensor:
    for _ in range(4):
        x = F.linear(x, WEIGHT, BIAS).view(6, 8)
    return x


def many_behind(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(F.linear(x, WEIGHT, BIAS) * 2).sigmoid() + x
    return x


@pytest.mark.parametrize(
    ("function", "fallback_us", "way", "launches", "pays"),
    [
        (one_kernel_behind, LONG, Way.TENSORS, Launches.EAGER, True),
        (one_kernel_behind, LONG, Way.SLICES, Launches.INDUCTOR, True),
        (nothing_behind, BRIEF, Way.TENSORS, Launches.EAGER, False),
        (one_kernel_behind, BRIEF, Way.TENSORS, Launches.EAGER, True),
        (one_kernel_behind, BRIEF, Way.TENSORS, Launches.CUDA_GRAPH, True),
        (one_kernel_behind, BRIEF, Way.TENSORS, Launches.INDUCTOR_GRAPH, True),
        (many_behind, BRIEF, Way.TENSORS, Launches.EAGER, True),
        (one_kernel_behind, BRIEF, Way.SLICES, Launches.EAGER, False),
        (many_behind, BRIEF, Way.TENSORS, Launches.INDUCTOR, False),
        (many_behind, BRIEF, Way.TWO_KERNELS, Launches.EAGER, True),
        (many_behind, LONG, Way.TWO_KERNELS, Launches.EAGER, True),
    ],
)
def test_whose_time_counts(
    function: Callable[[Tensor], Tensor],
    fallback_us: float,
    way: Way,
    launches: Launches,
    pays: bool,
) -> None:
    """Where the GPU waits, kernels that are spared count alone; Inductor has few to spare."""
    graph, chains = chains_of(function, torch.rand(6, 8))
    assert len(chains) == 4
    judged = {chain: Judged("", way, fallback_us, fallback_us / 2) for chain in chains}
    assert host.verdict(graph, judged, launches).why_not == ("" if pays else host.WAITS)


def test_what_grouped_products_compute_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, as Mixtral's: by their bytes alone the GPU would wait for the host, and nothing would be fused."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: (90, 132))
    rows = torch.empty(65536, 1024, dtype=torch.bfloat16, device="meta")
    wide = torch.empty(8, 1024, 7168, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(8, dtype=torch.int32, device="meta")

    def mixture(x: Tensor) -> tuple[Tensor, Tensor]:
        small = x
        for _ in range(60):  # of the routing, and norms
            small = small.relu()
        for _ in range(4):
            x = F.linear(x, WEIGHT, BIAS).view(6, 8)
        return x + small, torch._grouped_mm(rows, wide, ends)

    graph, chains = chains_of(mixture, torch.rand(6, 8))
    judged = {chain: Judged("", Way.SLICES, 100.0, 50.0) for chain in chains}
    assert len(chains) == 4 and host.verdict(graph, judged, Launches.EAGER).why_not == ""
    monkeypatch.setattr(costs, "_flops_per_us", lambda *of: math.inf)
    assert host.verdict(graph, judged, Launches.EAGER).why_not == host.WAITS


@pytest.mark.parametrize(
    ("function", "fallback_us", "gained", "learns", "expected"),
    [
        (one_kernel_behind, LONG, 0.5, False, host.Verdict()),  # the device's time is far longer
        (one_kernel_behind, LONG, 0.05, False, host.Verdict("", True)),  # but little is gained of it
        (one_kernel_behind, LONG, 0.25, False, host.Verdict("", True)),
        (many_behind, 40.0, 0.5, False, host.Verdict("", True)),
        (nothing_behind, BRIEF, 0.5, False, host.Verdict(host.WAITS)),  # too far behind to be tried
        (many_behind, 40.0, 0.5, True, host.Verdict()),  # the backward pass would not be timed
    ],
)
def test_what_is_unsure_is_measured(
    function: Callable[[Tensor], Tensor],
    fallback_us: float,
    gained: float,
    learns: bool,
    expected: host.Verdict,
) -> None:
    graph, chains = chains_of(function, torch.rand(6, 8, requires_grad=learns))
    fused_us = (1 - gained) * fallback_us
    judged = {chain: Judged("", Way.TENSORS, fallback_us, fused_us) for chain in chains}
    assert host.verdict(graph, judged, Launches.EAGER, measures=True) == expected
    assert not host.verdict(graph, judged, Launches.EAGER).is_unsure


@pytest.mark.parametrize(
    ("fallback_us", "gained", "way", "launches", "pays"),
    [
        # The host takes 0.82 ms for a step of four products, 1.41 ms if they are fused, or twice as much.
        (1000.0, 0.5, Way.SLICES, Launches.EAGER, True),
        (300.0, 0.5, Way.SLICES, Launches.EAGER, True),
        # The device's 2.4 ms become 1.2: faster on an idle host alone.
        (200.0, 0.5, Way.SLICES, Launches.EAGER, False),
        (60.0, 0.5, Way.SLICES, Launches.EAGER, False),
        (1000.0, 0.1, Way.SLICES, Launches.EAGER, True),  # the device is the limit, whatever is gained
        (60.0, 0.5, Way.TENSORS, Launches.EAGER, False),
        (200.0, 0.5, Way.SLICES, Launches.INDUCTOR, True),
    ],
)
def test_a_training_step_gains_on_a_slow_host_too(
    fallback_us: float, gained: float, way: Way, launches: Launches, pays: bool
) -> None:
    """Steps of wav2vec2 (fp32) and SIREN (bf16) took 1.28 and 1.08 times as long as eager's when fused."""
    graph, chains = chains_of(one_kernel_behind, torch.rand(6, 8, requires_grad=True))
    judged = {chain: Judged("", way, fallback_us, (1 - gained) * fallback_us) for chain in chains}
    assert host.verdict(graph, judged, launches, measures=True) == host.Verdict("" if pays else host.WAITS)


def test_what_is_expected_to_be_a_little_behind_is_tried() -> None:
    graph, chains = chains_of(one_kernel_behind, torch.rand(6, 8))
    judged = {chain: Judged("", Way.FALLBACK, 30.0, 15.0) for chain in chains}
    assert host.verdict(graph, judged, Launches.EAGER).why_not == host.WAITS
    assert host.verdict(graph, judged, Launches.EAGER, measures=True) == host.Verdict("", True)


def test_on_a_cpu_nothing_is_asked() -> None:
    graph, chains = chains_of(one_kernel_behind, torch.rand(6, 8))
    judged = {chain: Judged("") for chain in chains}
    assert host.verdict(graph, judged, Launches.EAGER).why_not == ""


def test_a_decision_holds_for_sizes_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not fused at 8 rows is asked about again at 64, and back at 8 nothing compiles."""
    asked: list[int] = []

    def judged(chain: Chain, **_: bool) -> Judged:
        rows = hint(chain.product.value.shape[0])
        asked.append(rows)
        return Judged("", Way.TENSORS, *((LONG, BRIEF) if rows >= 64 else (BRIEF, BRIEF)))

    monkeypatch.setattr(profit, "judged", judged)
    layer = nn.Linear(8, 8)
    model = epigemm.fuse(nn.Sequential(layer, nn.GELU()))
    report: Any = model.fusion_report
    with torch.no_grad():
        for rows, sites in ((8, 0), (16, 0), (3, 0), (64, 1), (128, 1), (8, 1), (16, 1)):
            x = torch.rand(rows, 8)
            torch.testing.assert_close(model(x), F.gelu(layer(x)))
            assert len(report.sites) == sites
    assert asked == [8, 64]
