"""Layers with a short K against the bare product: points -> numbers, what is below its bar, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases.short import GEOMEAN, MOST_BEHIND_US, WAVES, WORST, Point, has_waves
from benchmarks.harness.records import MM, geomean
from benchmarks.harness.report import Table, number

METHOD = (
    f"The bare product is torch.mm alone; where the epilogue reads a matrix, at least all bytes at 4.3 TB/s. With "
    f"{WAVES} waves of 128 x 256 tiles or more: the geometric mean of its time over ours is to be {GEOMEAN:g}, the "
    f"worst {WORST:g}. Elsewhere we are to be at most {MOST_BEHIND_US:g} us behind it. Eager is to be ahead by at most "
    "2%, below 10 us by at most 1 us."
)


def summarise(points: Sequence[Point], multiprocessors: int) -> dict[str, Any]:
    """The numbers of one epilogue in one type, and its bars that are missed."""
    many = [p for p in points if has_waves(p.case.shape, multiprocessors)]
    few = [p for p in points if not has_waves(p.case.shape, multiprocessors)]
    waves = _group(many)
    is_low = waves["geomean"] is not None and waves["geomean"] < GEOMEAN
    mean = (
        [f"geometric mean {waves['geomean']:.3f} of the bare product, wanted {GEOMEAN:g}"] if is_low else []
    )
    whys = [(p, p.why_missed(multiprocessors)) for p in points]
    return {
        "points": len(points),
        "waves": waves,
        "elsewhere": _group(few),
        "vs_eager": _worst([(ratio, p) for p in points if (ratio := p.vs_eager)]),
        "missed": mean + [f"{p.case.shape}: {why}, {_times(p)}" for p, why in whys if why],
    }


def _group(points: Sequence[Point]) -> dict[str, Any]:
    behind = max(points, key=lambda p: p.behind_us, default=None)
    return {
        "points": len(points),
        **_worst([(p.ratio, p) for p in points]),
        "most_us_behind": None if behind is None else behind.behind_us,
        "most_us_behind_at": "" if behind is None else str(behind.case.shape),
    }


def _worst(found: Sequence[tuple[float, Point]]) -> dict[str, Any]:
    worst = min(found, key=lambda pair: pair[0], default=None)
    return {
        "geomean": geomean([ratio for ratio, _ in found]),
        "worst": None if worst is None else worst[0],
        "worst_at": "" if worst is None else str(worst[1].case.shape),
    }


def _times(point: Point) -> str:
    return ", ".join(f"{name} {us:.2f} us" for name, us in point.us.items())


def missed(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All bars that are missed."""
    return [f"{name}: {line}" for name, case in cases.items() for line in case["missed"]]


def table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
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


def _with_place(case: Mapping[str, Any], key: str) -> str:
    at = case[f"{key}_at"]
    return number(case[key]) + f" ({at})" * bool(at)
