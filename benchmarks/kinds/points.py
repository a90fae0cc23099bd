"""What ``--random`` found: the results of a series -> its numbers, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import Shape
from benchmarks.cases.random import SMALL_US, Series
from benchmarks.cases.short import GEOMEAN, WAVES, ShortSeries, has_waves
from benchmarks.harness.records import COMPILE, EAGER, MM, PEERS, CaseResult, Measurement, geomean
from benchmarks.harness.report import Table, number

_WORST_SHOWN = 20
Placed = tuple[float, str]
"""A ratio and the shape that it is of."""


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


def ratios(series: Series, found: Sequence[tuple[dict[str, float], str]], *other: str) -> list[Placed]:
    """The times of another (by default of the best baseline) over ours, as far as both are known."""
    return [(ratio, at) for us, at in found if (ratio := series.ratio(us, *other))]


def _spread(found: Sequence[Placed]) -> dict[str, Any]:
    worst, at = min(found, default=(None, ""))
    return {"geomean": geomean([ratio for ratio, _ in found]), "worst": worst, "worst_at": at}


def peers(series: Series, found: Sequence[tuple[dict[str, float], str]]) -> dict[str, Any]:
    """Of other libraries that took part."""
    every = {name: ratios(series, found, name) for name in PEERS}
    return {f"vs_{name}": {"points": len(of), **_spread(of)} for name, of in every.items() if of}


def summarise(series: Series, results: Sequence[CaseResult]) -> dict[str, Any]:
    """The numbers of one series. Means are of all points, worst ratios of those from 10 us on."""
    timed = [(us, size(result)) for result in results if (us := counted(series, result))]
    small = [(us, at) for us, at in timed if series.small(us)]
    large = [(us, at) for us, at in timed if not series.small(us)]
    behind = max(((series.behind_us(us), at) for us, at in small), default=(None, ""))
    worst = _spread(ratios(series, large))
    return {
        "points": len(results),
        "geomean": _spread(ratios(series, timed))["geomean"],
        "worst": worst["worst"],
        "worst_at": worst["worst_at"],
        "points_under_10us": len(small),
        "most_us_behind_under_10us": behind[0],
        "most_us_behind_under_10us_at": behind[1],
        "bare_geomean": _spread(ratios(series, timed, MM))["geomean"],
        "vs_eager_worst": _spread(ratios(series, large, EAGER))["worst"],
        "vs_compile_geomean": _spread(ratios(series, timed, COMPILE))["geomean"],
        "missed": _missed(series, results),
        "wrong": sum(bool(ours(series, result).why_wrong) for result in results),
    } | peers(series, timed)


def _missed(series: Series, results: Sequence[CaseResult]) -> list[str]:
    """The points that are below their bars."""
    found = []
    for result in results:
        us = counted(series, result)
        if why := series.why_missed(Shape(*result.shape), us):
            times = ", ".join(f"{name} {each:.2f} us" for name, each in us.items())
            found.append(f"{size(result)}: {why}, {times}")
    return found


def summary_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each series."""
    first = ("case", "points", "geomean", "worst", f"under {SMALL_US:g} us", "most us behind there")
    columns = (*first, "vs mm: geomean", "vs eager: worst", "vs compile: geomean", "below the bar", "wrong")
    rows = []
    for name, case in cases.items():
        row = [name, str(case["points"]), number(case["geomean"]), _with_place(case, "worst")]
        row += [str(case["points_under_10us"]), _with_place(case, "most_us_behind_under_10us")]
        row += [number(case[key]) for key in ("bare_geomean", "vs_eager_worst", "vs_compile_geomean")]
        rows.append([*row, str(len(case["missed"])), str(case["wrong"])])
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


# --- a short K --------------------------------------------------------------------------------------------------------


def summarise_short(series: ShortSeries, results: Sequence[CaseResult]) -> dict[str, Any]:
    """The numbers of one epilogue in one type, against the bare product, and its bars that are missed."""
    timed = [(Shape(*result.shape), us) for result in results if (us := counted(series, result))]
    many, few = (
        [(shape, us) for shape, us in timed if has_waves(shape, series.multiprocessors) == which]
        for which in (True, False)
    )
    placed = [(us, str(shape)) for shape, us in timed]
    waves = _held(series, many)
    is_low = waves["geomean"] is not None and waves["geomean"] < GEOMEAN
    low = f"geometric mean {waves['geomean']:.3f} of the bare product, wanted {GEOMEAN:g}" if is_low else ""
    return {
        "points": len(timed),
        "waves": waves,
        "elsewhere": _held(series, few),
        "vs_eager": _spread(ratios(series, placed, EAGER)),
        "missed": [low] * is_low + _missed(series, results),
        "wrong": sum(bool(ours(series, result).why_wrong) for result in results),
    } | peers(series, placed)


def _held(series: ShortSeries, found: Sequence[tuple[Shape, dict[str, float]]]) -> dict[str, Any]:
    """Against the bare product: ratios, and how far behind it is at most."""
    bare = [(series.bare_us(shape, us), us[series.own], str(shape)) for shape, us in found]
    behind = max(((mine - least, at) for least, mine, at in bare), default=(None, ""))
    spread = _spread([(least / mine, at) for least, mine, at in bare])
    return {"points": len(bare), **spread, "most_us_behind": behind[0], "most_us_behind_at": behind[1]}


def short_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each epilogue and type."""
    columns = ("case", f"points of {WAVES} waves", "geomean", "worst", "others", "geomean", "most us behind")
    rows = []
    for name, case in cases.items():
        many, few, eager = case["waves"], case["elsewhere"], case["vs_eager"]
        row = [name, str(many["points"]), number(many["geomean"]), _with_place(many, "worst")]
        row += [str(few["points"]), number(few["geomean"]), _with_place(few, "most_us_behind")]
        rows.append([*row, number(eager["geomean"]), _with_place(eager, "worst"), str(len(case["missed"]))])
    title = f"The time of the bare product ({MM}) and of eager over ours (above 1: epigemm is faster)"
    return Table(title, (*columns, "vs eager: geomean", "worst", "bars missed"), rows)


def peer_tables(cases: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """One row for each series and library beside it; no table without any."""
    rows = [
        [name, peer, str(of["points"]), number(of["geomean"]), _with_place(of, "worst")]
        for name, case in cases.items()
        for peer in PEERS
        if (of := case.get(f"vs_{peer}"))
    ]
    columns = ("case", "library", "points", "geomean", "worst")
    return [Table("The time of other libraries over ours", columns, rows)] if rows else []
