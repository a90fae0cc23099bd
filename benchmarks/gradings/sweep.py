"""Every class of data over K and seeds, and the K from which an arithmetic is as accurate as what it stands in for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gradings.data import EXTREME, DataClass
from benchmarks.gradings.measures import Errors, Exact, errors, worst
from benchmarks.gradings.products import BASELINE, SGEMM, SPLIT, Product, forced, plan_of, sgemm

ROWS = COLUMNS = 1024
KS = tuple(2**power for power in range(16))
RMS_LIMIT = 1.3
# At few rows SGEMM splits a long K, and rounds shorter sums.
FEW_ROWS = (1, 2, 7, 16, 32, 48, 64)
LAYERS = ((4096, 512), (1024, 2048), (4096, 8192), (8192, 28672))  # N, K
# The scaled slice and TF32 round the same operands to the same eleven bits: they differ in ties and in accumulation.
NEARLY_EQUAL = 1.05
# (largest ratio of maxima, largest ratio of rms) that count as "no less accurate"
LIMITS = {"split": (1.0, RMS_LIMIT), "scaled": (NEARLY_EQUAL, NEARLY_EQUAL)}


@dataclass(frozen=True)
class Point:
    """One class at one K: the errors of each product, the worst over seeds."""

    data: str
    k: int
    seeds: int
    errors: dict[str, Errors]
    size: tuple[int, int] = (ROWS, COLUMNS)

    def times_baseline(self, arithmetic: str) -> tuple[float, float]:
        """Maximum and rms as multiples of the baseline's; 0/0 is 1."""
        ours, baseline = self.errors[arithmetic], self.errors[BASELINE[arithmetic]]
        return _times(ours.max_ratio, baseline.max_ratio), _times(ours.rms_ratio, baseline.rms_ratio)

    def as_accurate(self, arithmetic: str) -> bool:
        """Whether the arithmetic is no less accurate here than its baseline."""
        largest, rms = self.times_baseline(arithmetic)
        limit_max, limit_rms = LIMITS[arithmetic]
        return largest <= limit_max and rms <= limit_rms and not self.errors[arithmetic].not_finite


def _times(ours: float, baseline: float) -> float:
    if ours == baseline:
        return 1.0
    return ours / baseline if baseline else float("inf")


def seeds_for(k: int) -> int:
    """More seeds where a case is cheap and a maximum is decided by few elements."""
    return 4 if k <= 512 else 2


def grade(
    products: Mapping[str, Product],
    data: DataClass,
    k: int,
    seeds: int,
    device: torch.device,
    size: tuple[int, int] = (ROWS, COLUMNS),
) -> Point:
    """One class at one K."""
    found: dict[str, list[Errors]] = {name: [] for name in products}
    for seed in range(seeds):
        x, weight = data.make(*size, k, seed, device)
        exact = Exact.of(x, weight)
        for name, product in products.items():
            found[name].append(errors(product(x, weight), exact))
    return Point(data.name, k, seeds, {name: worst(list_) for name, list_ in found.items()}, size)


def grade_few_rows(data: DataClass, m: int, n: int, k: int, device: torch.device) -> Point | None:
    """One class at few rows, by the plan that dispatch takes beside a packed weight; None: it takes SGEMM."""
    plan = plan_of("bias", m, n, k, SPLIT, packed=True)
    if not plan["fused"]:
        return None
    graded = {SGEMM: sgemm, SPLIT: forced(SPLIT, plan["plan"])}
    # A row has few elements for a maximum: more draws of fewer rows.
    return grade(graded, data, k, max(2, 8 // m), device, (m, n))


def run_few_rows(device: torch.device, classes: Sequence[DataClass]) -> list[Point]:
    """Every class at every few rows, where dispatch takes the split."""
    found = [grade_few_rows(data, m, n, k, device) for data in classes for m in FEW_ROWS for n, k in LAYERS]
    return [point for point in found if point is not None]


def threshold(points: Iterable[Point], arithmetic: str) -> int | None:
    """The smallest measured K from which on every point is as accurate as the other; None: not even the largest."""
    points = list(points)
    worst = max((point.k for point in points if not point.as_accurate(arithmetic)), default=0)
    return min((point.k for point in points if point.k > worst), default=None)


def thresholds(points: Sequence[Point], arithmetic: str) -> dict[str, int | None]:
    """`threshold` for each class by itself, and for all of them together but the extreme ones."""
    names = dict.fromkeys(point.data for point in points)
    found = {name: threshold([p for p in points if p.data == name], arithmetic) for name in names}
    extreme = {data.name for data in EXTREME}
    return found | {"all": threshold([p for p in points if p.data not in extreme], arithmetic)}
