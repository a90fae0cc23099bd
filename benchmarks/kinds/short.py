"""``--random SEED --short``: drawn layers with a short K, each epilogue held to the time of the bare product."""

from __future__ import annotations

import dataclasses

from benchmarks import baselines
from benchmarks.cases import CUSTOM, Shape
from benchmarks.cases.short import Point, ShortSeries, draw, select
from benchmarks.harness.records import EAGER, MM, OURS, QUACK, CaseResult
from benchmarks.harness.report import progress
from benchmarks.harness.runner import Budget
from benchmarks.kinds import Run, short_points
from benchmarks.kinds.points import counted, ours, size
from benchmarks.kinds.random import EFFORT, Drawing, folder

METHOD = (
    "Shapes drawn at random from the seed, none of them chosen. Ours is a Python function, decorated. Medians of calls "
    "in turn, the L2 cache flushed before each call, the host ahead. A point below a bar is measured twice more; the "
    f"turn of the median ratio to torch.mm counts. {short_points.METHOD}"
)


def main(run: Run) -> int:
    """Measure everything, kept after each series; 1 if a result of ours is wrong.

    Raises:
        ValueError: no seed, or a pattern that matches nothing.
    """
    options, about = run.options, run.about
    if options.random is None:
        raise ValueError("--short: goes with --random SEED")
    chosen = select(options.cases, run.multiprocessors)
    among = [b for b in baselines.of_kind(CUSTOM) if b.name in (OURS, EAGER, MM, QUACK)]
    is_left_out = QUACK not in (*options.peers, *options.exclude)
    available, absent = run.baselines(among, [QUACK] if is_left_out else [])
    if is_left_out:
        absent[QUACK] = "it tunes itself for seconds at each shape: takes part where --peers names it"
    drawing = Drawing(run.bench(EFFORT), available, Budget(run.budget))
    where = folder(options.output, about, options.random, "short")
    record = run.record("short", METHOD, dataclasses.asdict(EFFORT), where)
    record.absent = absent
    left_out = drawing.budget.left_out
    record.figures = {"seed": options.random, "points": options.count, "left_out": left_out, "cases": {}}
    shapes = draw(options.random, options.count)
    told = progress(len(shapes) * len(chosen))
    wrong: list[str] = []
    for series in chosen:
        results = []
        for result in drawing.measure([series], shapes):
            results.append(result)
            told(result.case)
        record.results += results
        found = short_points.summarise(points(series, results), run.multiprocessors)
        whys = [(size(result), ours(series, result).why_wrong) for result in results]
        wrong += [f"WRONG: {series.name} {at}: {why}" for at, why in whys if why]
        record.figures["cases"][series.name] = found | {"wrong": sum(bool(why) for _, why in whys)}
        record.figures["missed"] = short_points.missed(record.figures["cases"]) if about["gpu"] else []
        record.write()
    reasons = list(left_out.values())
    remarks = wrong + [f"{reasons.count(why)} points: {why}" for why in dict.fromkeys(reasons)]
    remarks += [f"missed: {line}" for line in record.figures["missed"]]
    record.finish([short_points.table(record.figures["cases"])], remarks)
    return bool(wrong)


def points(series: ShortSeries, results: list[CaseResult]) -> list[Point]:
    """Those that have times of ours and of the bare product, in the turn that counts."""
    found = (series.point(Shape(*result.shape), counted(series, result)) for result in results)
    return [point for point in found if point is not None]
