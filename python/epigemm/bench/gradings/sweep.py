"""Every class of data over K and seeds, and the K from which an arithmetic is as accurate as what it stands in for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epigemm.bench.gradings.data import CLASSES, EXTREME, DataClass
from epigemm.bench.gradings.measures import Errors, Exact, errors, worst
from epigemm.bench.gradings.products import RIVAL, Product

ROWS = COLUMNS = 1024
KS = tuple(2**power for power in range(16))
RMS_LIMIT = 1.3
# The scaled pieces and TF32 round the same operands to the same eleven bits: they differ in ties and in accumulation.
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

    def record(self) -> dict[str, Any]:
        """As plain data."""
        found = {name: e.record() for name, e in self.errors.items()}
        return {"data": self.data, "k": self.k, "seeds": self.seeds, "errors": found}

    def times_rival(self, arithmetic: str) -> tuple[float, float]:
        """Maximum and rms as multiples of the rival's; 0/0 is 1."""
        ours, rival = self.errors[arithmetic], self.errors[RIVAL[arithmetic]]
        return _times(ours.max_ratio, rival.max_ratio), _times(ours.rms_ratio, rival.rms_ratio)

    def as_accurate(self, arithmetic: str) -> bool:
        """Whether the arithmetic is no less accurate here than its rival."""
        largest, rms = self.times_rival(arithmetic)
        limit_max, limit_rms = LIMITS[arithmetic]
        return largest <= limit_max and rms <= limit_rms and not self.errors[arithmetic].not_finite


def _times(ours: float, rival: float) -> float:
    if ours == rival:
        return 1.0
    return ours / rival if rival else float("inf")


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
    return Point(data.name, k, seeds, {name: worst(list_) for name, list_ in found.items()})


def run(
    products: Mapping[str, Product],
    device: torch.device,
    *,
    classes: Sequence[DataClass] = (*CLASSES, *EXTREME),
    ks: Sequence[int] = KS,
    size: tuple[int, int] = (ROWS, COLUMNS),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Every class at every K."""
    points: list[Point] = []
    for data in classes:
        points += [grade(products, data, k, seeds_for(k), device, size) for k in ks]
        progress(data.title)
    return points


def threshold(points: Iterable[Point], arithmetic: str) -> int | None:
    """The smallest measured K from which on every point is as accurate as the rival; None: not even the largest."""
    chosen: int | None = None
    by_k: dict[int, list[Point]] = {}
    for point in points:
        by_k.setdefault(point.k, []).append(point)
    for k in sorted(by_k, reverse=True):
        if not all(point.as_accurate(arithmetic) for point in by_k[k]):
            break
        chosen = k
    return chosen


def thresholds(points: Sequence[Point], arithmetic: str) -> dict[str, int | None]:
    """`threshold` for each class by itself, and for all of them together but the extreme ones."""
    names = dict.fromkeys(point.data for point in points)
    found = {name: threshold([p for p in points if p.data == name], arithmetic) for name in names}
    extreme = {data.name for data in EXTREME}
    return found | {"all": threshold([p for p in points if p.data not in extreme], arithmetic)}
