"""The share of eager's device time that the best plans are predicted to save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from benchmarks.models import ceiling
from epigemm.fusion import profit
from epigemm.fusion.profit import Judged, Way

BYTES_PER_US = 64.0
FALLBACK_US, FUSED_US = 100.0, 60.0


class Model(nn.Module):
    """Two products: behind the first a GELU and a sum, behind the second nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)) + other)
        return result


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    chosen, why_not = request.param

    def judged(chain: object, *args: object, **kwargs: object) -> Judged:
        return Judged(why_not, chosen, FALLBACK_US, FUSED_US)

    monkeypatch.setattr(profit, "judged", judged)
    monkeypatch.setattr(ceiling, "bytes_per_us", lambda: BYTES_PER_US)


# Of 4 x 16 fp32: 256 bytes. The GELU moves two such tensors, the sum three.
GELU_US, SUM_US = 3 + 512 / BYTES_PER_US, 3 + 768 / BYTES_PER_US


@pytest.mark.parametrize(
    ("way", "behind_us"),
    [
        ((Way.TENSORS, ""), GELU_US),
        ((Way.FALLBACK, profit.SLOWER), GELU_US),
        ((Way.FALLBACK, ""), GELU_US + SUM_US),  # all of it in the product's kernel
    ],
    indirect=["way"],
)
def test_chains_operator_by_operator_and_by_their_best_plans(way: None, behind_us: float) -> None:
    """The planner's fallback has one kernel behind the product, which counts for the largest of eager's."""
    fused: Any = epigemm.fuse(Model())
    inputs = torch.randn(4, 8), torch.randn(4, 16)
    with torch.no_grad(), ceiling.watched() as found:
        fused(*inputs)
        fused(*inputs)
    assert sorted(found.chains.values()) == [(FALLBACK_US, FUSED_US), (FALLBACK_US + behind_us, FUSED_US)]


@pytest.mark.parametrize("way", [(Way.TENSORS, "")], indirect=True)
def test_an_error_of_its_own_changes_nothing(way: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "bytes_per_us", lambda: 1 / 0)
    fused: Any = epigemm.fuse(Model(), strict=True)
    with torch.no_grad(), ceiling.watched() as found:
        fused(torch.randn(4, 8), torch.randn(4, 16))
    assert fused.fusion_report.sites and isinstance(found.error, ZeroDivisionError)


@pytest.mark.parametrize("way", [(Way.TENSORS, "")], indirect=True)
def test_outside_of_the_block_nothing_is_watched(way: None) -> None:
    judged = profit.judged
    with ceiling.watched() as found:
        pass
    with torch.no_grad():
        epigemm.fuse(Model())(torch.randn(4, 8), torch.randn(4, 16))
    assert profit.judged is judged and not found.chains


def test_a_cpu_has_no_planner_to_ask() -> None:
    with torch.no_grad(), ceiling.watched() as found:
        epigemm.fuse(Model())(torch.randn(4, 8), torch.randn(4, 16))
    assert not found.chains


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([], 1.0),
        ([(1000.0, 1000.0)], 1.0),
        ([(1500.0, 500.0)], 2.0),
        ([(500.0, 250.0), (1000.0, 250.0)], 2.0),
        ([(2000.0, 500.0)], 4.0),  # all of eager
        ([(4000.0, 500.0)], 4.0),  # more than all of it: half of that counts
        ([(1000.0, 500.0), (3000.0, 500.0)], 2.0),  # 500 and 1500 count: nothing is gained of the first
        ([(1000.0, 800.0), (3000.0, 500.0)], 2.0),  # which then takes 500, not 800
    ],
)
def test_eager_of_two_milliseconds_over_what_is_left(
    chains: list[tuple[float, float]], expected: float
) -> None:
    assert ceiling.ceiling(2.0, chains) == pytest.approx(expected)


def test_a_fallback_that_is_predicted_too_slow_raises_no_ceiling() -> None:
    """16 layers of 4096^3 in fp32: 44.8 ms measured, 48 ms predicted. The kernels' own prediction is the bound."""
    layer = (3000.0, 650.0)
    assert ceiling.ceiling(44.8, 16 * [layer]) == pytest.approx(44.8 / 10.4)
    at_most = [ceiling.ceiling(44.8, 16 * [(plain, 650.0)]) for plain in (2600.0, 2800.0, 3000.0, 1e6)]
    assert at_most == sorted(at_most) and at_most[1] == pytest.approx(at_most[-1])


@pytest.mark.gpu
def test_what_a_kernel_moves_on_this_gpu() -> None:
    """Within a factor of two of what a copy of 256 MB does."""
    x = torch.empty(1 << 26, device="cuda")
    y = torch.empty_like(x)
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    for _ in range(3):
        first.record()
        y.copy_(x)
        last.record()
    torch.cuda.synchronize()
    measured = 8 * x.numel() / (1e3 * first.elapsed_time(last))
    assert 0.5 < ceiling.bytes_per_us() / measured < 2
