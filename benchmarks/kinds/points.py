"""What ``--random`` found: points -> the numbers of a series, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import Case, Shape
from benchmarks.cases.random import BARE, SMALL_US, Series
from benchmarks.harness.records import COMPILE, EAGER, OWN, CaseResult, geomean
from benchmarks.harness.report import Table, number

_WORST_SHOWN = 20


@dataclass
class Point:
    """One series at one shape.

    Attributes:
        turns: microseconds of each alternative, by its name; two turns more where the first was below the bar.
        kernel: which of our kernels ran.
        wrong: why our result is wrong or missing ("" where it is right).
    """

    series: Series
    shape: Shape
    turns: list[dict[str, float]] = field(default_factory=list)
    kernel: str = ""
    wrong: str = ""

    @classmethod
    def of(cls, series: Series, case: Case, result: CaseResult) -> Point:
        """What belongs to one series: without the times of another's call of ours."""
        found = result.measurements
        ours = found.get(series.own) or next(iter(found.values()))
        others = [name for name in OWN if name != series.own]
        turns = [
            {name: 1e3 * ms for name, ms in group.ms().items() if name not in others}
            for group in result.groups
        ]
        return cls(series, case.shape, turns, ours.kernel, ours.why_wrong)

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


def summarise(points: Sequence[Point]) -> dict[str, Any]:
    """The numbers of one series. Means and worst ratios leave out the points under 20 us, unless they are named so."""
    timed = [point for point in points if point.ratio is not None]
    large = [point for point in timed if not point.series.small(point.us)]
    small = [point for point in timed if point.series.small(point.us)]

    def ratios(*others: str, of: Sequence[Point]) -> list[tuple[float, str]]:
        found = [(point.series.ratio(point.us, *others), point.size) for point in of]
        return [(ratio, size) for ratio, size in found if ratio is not None]

    def mean(*others: str, of: Sequence[Point] = large) -> float | None:
        return geomean([ratio for ratio, _ in ratios(*others, of=of)])

    def worst(*others: str, of: Sequence[Point] = large) -> tuple[float | None, str]:
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


def _at(value: float | None, size: str) -> str:
    return "" if value is None else f"{value:.3f} ({size})"


def summary_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each series."""
    first = ("case", "points", "geomean", "worst", f"under {SMALL_US:g} us", "geomean", "worst")
    columns = (*first, "vs mm: geomean", "vs eager: worst", "vs compile: geomean", "below the bar", "wrong")
    rows = [
        [
            name,
            str(case["points"]),
            number(case["geomean"]),
            _at(case["worst"], case["worst_at"]),
            str(case["points_under_20us"]),
            number(case["geomean_under_20us"]),
            _at(case["worst_under_20us"], case["worst_under_20us_at"]),
            *(number(case[key]) for key in ("bare_geomean", "vs_eager_worst", "vs_compile_geomean")),
            str(case["below"]),
            str(case["wrong"]),
        ]
        for name, case in cases.items()
    ]
    return Table("Summary: the best baseline's time over ours (above 1: epigemm is faster)", columns, rows)


def point_table(title: str, points: Sequence[Point]) -> Table:
    """One row for each point, the worst first."""
    columns = ("case", "MxNxK", "ratio", "of turns", "us", "best", "us", "mm us", "compile us", "kernel")
    rows = []
    for point in sorted(points, key=lambda point: point.ratio or 0.0):
        us, best = point.us, point.series.best(point.us)
        turns = " ".join(f"{ratio:.3f}" for ratio in point.ratios) if len(point.ratios) > 1 else ""
        times = [f"{us[name]:.4g}" if name in us else "" for name in (best, BARE, COMPILE)]
        head = [point.series.name, point.size, number(point.ratio), turns]
        rows.append([*head, f"{us[point.series.own]:.4g}", best, *times, point.kernel])
    return Table(title, columns, rows)


def worst_points(points: Sequence[Point], count: int = _WORST_SHOWN) -> list[Point]:
    """The worst of each series."""
    timed = sorted((p for p in points if p.ratio is not None), key=lambda point: point.ratio or 0.0)
    names = dict.fromkeys(point.series.name for point in points)
    return [point for name in names for point in [p for p in timed if p.series.name == name][:count]]
