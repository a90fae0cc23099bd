"""What ``--random`` found: the results of a series -> its numbers, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases.random import SMALL_US, Series
from benchmarks.harness.records import COMPILE, EAGER, MM, CaseResult, Measurement, geomean
from benchmarks.harness.report import Table, number

_WORST_SHOWN = 20


def size(result: CaseResult) -> str:
    """MxNxK."""
    return "x".join(map(str, result.shape))


def ours(series: Series, result: CaseResult) -> Measurement:
    """The series' own call; where no operand could be made, what says so."""
    found = result.measurements
    return found.get(series.own) or next(iter(found.values()))


def counted(series: Series, result: CaseResult) -> dict[str, float]:
    """Microseconds in the turn that counts, the one of the median ratio; empty where none has a ratio."""
    turns = [group.us() for group in result.groups]
    timed = sorted((turn for turn in turns if series.ratio(turn)), key=lambda turn: series.ratio(turn) or 0.0)
    return timed[len(timed) // 2] if timed else {}


def summarise(series: Series, results: Sequence[CaseResult]) -> dict[str, Any]:
    """The numbers of one series. Means are of all points, worst ratios of those from 10 us on."""
    timed = [(us, size(result)) for result in results if (us := counted(series, result))]
    small = [(us, at) for us, at in timed if series.small(us)]
    large = [(us, at) for us, at in timed if not series.small(us)]

    def mean(*other: str) -> float | None:
        return geomean([ratio for us, _ in timed if (ratio := series.ratio(us, *other))])

    def worst(*other: str) -> tuple[float | None, str]:
        found = [(ratio, at) for us, at in large if (ratio := series.ratio(us, *other))]
        return min(found, default=(None, ""))

    behind = max(((series.behind_us(us), at) for us, at in small), default=(None, ""))
    return {
        "points": len(results),
        "geomean": mean(),
        "worst": worst()[0],
        "worst_at": worst()[1],
        "points_under_10us": len(small),
        "most_us_behind_under_10us": behind[0],
        "most_us_behind_under_10us_at": behind[1],
        "bare_geomean": mean(MM),
        "vs_eager_worst": worst(EAGER)[0],
        "vs_compile_geomean": mean(COMPILE),
        "below": sum(series.misses(us) for us, _ in timed),
        "wrong": sum(bool(ours(series, result).why_wrong) for result in results),
    }


def summary_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each series."""
    first = ("case", "points", "geomean", "worst", f"under {SMALL_US:g} us", "most us behind there")
    columns = (*first, "vs mm: geomean", "vs eager: worst", "vs compile: geomean", "below the bar", "wrong")
    rows = []
    for name, case in cases.items():
        row = [name, str(case["points"]), number(case["geomean"]), _with_place(case, "worst")]
        row += [str(case["points_under_10us"]), _with_place(case, "most_us_behind_under_10us")]
        row += [number(case[key]) for key in ("bare_geomean", "vs_eager_worst", "vs_compile_geomean")]
        rows.append([*row, str(case["below"]), str(case["wrong"])])
    return Table("Summary: the best baseline's time over ours (above 1: epigemm is faster)", columns, rows)


def _with_place(case: Mapping[str, Any], key: str) -> str:
    at = case[f"{key}_at"]
    return number(case[key]) + f" ({at})" * bool(at)


def worst_table(found: Mapping[Series, Sequence[CaseResult]], count: int = _WORST_SHOWN) -> Table:
    """One row for each of the worst points of each series, the worst first."""
    columns = ("case", "MxNxK", "ratio", "of turns", "us", "best", "us", "mm us", "compile us", "kernel")
    rows = []
    for series, results in found.items():
        timed = [(ratio, result) for result in results if (ratio := series.ratio(counted(series, result)))]
        for ratio, result in sorted(timed, key=lambda pair: pair[0])[:count]:
            us = counted(series, result)
            turns = [number(series.ratio(group.us())) for group in result.groups]
            best = series.best(us)
            times = [number(us.get(name), ".4g") for name in (best, MM, COMPILE)]
            head = [series.name, size(result), number(ratio), " ".join(turns) if len(turns) > 1 else ""]
            rows.append([*head, f"{us[series.own]:.4g}", best, *times, ours(series, result).kernel])
    return Table("The worst points of each case", columns, sorted(rows, key=lambda row: float(row[2])))
