"""Points -> the numbers of a case, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import Shape
from benchmarks.drawn.series import BARE, COMPILE, SMALL_US, Series
from benchmarks.grid.tables import geomean
from benchmarks.records import EAGER
from benchmarks.tables import Table

WORST_SHOWN = 20


@dataclass
class DrawnPoint:
    """One case at one shape.

    Attributes:
        turns: microseconds of each alternative, by its name; two turns more where the first was below the bar.
        plan: which of our kernels ran.
        wrong: why our result is wrong or missing ("" where it is right).
        errors: what else did not run, and why.
    """

    series: Series
    shape: Shape
    turns: list[dict[str, float]] = field(default_factory=list)
    plan: str = ""
    wrong: str = ""
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """MxNxK."""
        return str(self.shape)

    @property
    def ratios(self) -> list[float]:
        """Of each turn."""
        found = (self.series.ratio(turn) for turn in self.turns)
        return [ratio for ratio in found if ratio is not None]

    @property
    def us(self) -> dict[str, float]:
        """The turn that counts: the one of the median ratio."""
        turns = [turn for turn in self.turns if self.series.ratio(turn) is not None]
        turns.sort(key=lambda turn: self.series.ratio(turn) or 0.0)
        return turns[len(turns) // 2] if turns else {}

    @property
    def ratio(self) -> float | None:
        """The best baseline's time over ours."""
        return self.series.ratio(self.us)

    @property
    def below(self) -> bool:
        """Whether it is below its bar."""
        return self.series.misses(self.us)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        us = self.us
        return {
            "case": self.series.name,
            "shape": [self.shape.m, self.shape.n, self.shape.k],
            "us": us,
            "best": self.series.best(us),
            "ratio": self.ratio,
            "ratios": self.ratios,
            "turns": self.turns if len(self.turns) > 1 else [],
            "below": self.below,
            "plan": self.plan,
            "wrong": self.wrong,
            "errors": self.errors,
        }


def summarise(points: Sequence[DrawnPoint]) -> dict[str, Any]:
    """The numbers of one case. Means and worst ratios leave out the points under 20 us, unless they are named so."""
    timed = [point for point in points if point.ratio is not None]
    large = [point for point in timed if not point.series.small(point.us)]
    small = [point for point in timed if point.series.small(point.us)]

    def ratios(*others: str, of: Sequence[DrawnPoint]) -> list[tuple[float, str]]:
        found = [(point.series.ratio(point.us, *others), point.size) for point in of]
        return [(ratio, size) for ratio, size in found if ratio is not None]

    def mean(*others: str, of: Sequence[DrawnPoint] = large) -> float | None:
        return geomean([ratio for ratio, _ in ratios(*others, of=of)])

    def worst(*others: str, of: Sequence[DrawnPoint] = large) -> tuple[float | None, str]:
        return min(ratios(*others, of=of), default=(None, ""))

    return {
        "points": len(points),
        "geomean": mean(),
        "worst": worst()[0],
        "worst_at": worst()[1],
        "points_under_20us": len(small),
        "geomean_under_20us": mean(of=small),
        "worst_under_20us": worst(of=small)[0],
        "worst_under_20us_at": worst(of=small)[1],
        "bare_geomean": mean(BARE),
        "vs_eager_worst": worst(EAGER)[0],
        "vs_compile_geomean": mean(COMPILE),
        "below": sum(point.below for point in timed),
        "wrong": sum(bool(point.wrong) for point in points),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _at(value: float | None, size: str) -> str:
    return "" if value is None else f"{value:.3f} ({size})"


def summary_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each case."""
    columns = (
        "case",
        "points",
        "geomean",
        "worst",
        f"under {SMALL_US:g} us",
        "geomean",
        "worst",
        "vs mm: geomean",
        "vs eager: worst",
        "vs compile: geomean",
        "below the bar",
        "wrong",
    )
    rows = [
        [
            name,
            str(case["points"]),
            _number(case["geomean"]),
            _at(case["worst"], case["worst_at"]),
            str(case["points_under_20us"]),
            _number(case["geomean_under_20us"]),
            _at(case["worst_under_20us"], case["worst_under_20us_at"]),
            _number(case["bare_geomean"]),
            _number(case["vs_eager_worst"]),
            _number(case["vs_compile_geomean"]),
            str(case["below"]),
            str(case["wrong"]),
        ]
        for name, case in cases.items()
    ]
    return Table("Summary: the best baseline's time over ours (above 1: epigemm is faster)", columns, rows)


def point_table(title: str, points: Sequence[DrawnPoint]) -> Table:
    """One row for each point, the worst first."""
    columns = ("case", "MxNxK", "ratio", "of turns", "us", "best", "us", "mm us", "compile us", "road")
    rows = []
    for point in sorted(points, key=lambda point: point.ratio or 0.0):
        us, best = point.us, point.series.best(point.us)
        turns = " ".join(f"{ratio:.3f}" for ratio in point.ratios) if len(point.ratios) > 1 else ""
        times = (f"{us[name]:.4g}" if name in us else "" for name in (best, BARE, COMPILE))
        ours, *others = f"{us[point.series.own]:.4g}", *times
        rows.append(
            [point.series.name, point.size, _number(point.ratio), turns, ours, best, *others, point.plan]
        )
    return Table(title, columns, rows)


def worst_points(points: Sequence[DrawnPoint], count: int = WORST_SHOWN) -> list[DrawnPoint]:
    """The worst of each case."""
    timed = sorted((p for p in points if p.ratio is not None), key=lambda point: point.ratio or 0.0)
    names = dict.fromkeys(point.series.name for point in points)
    return [point for name in names for point in [p for p in timed if p.series.name == name][:count]]
