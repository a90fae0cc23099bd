"""``make bench``: the five models, ours beside what PyTorch users have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import baselines
from benchmarks.cases import LINEAR, problems
from benchmarks.harness.progress import shown_progress
from benchmarks.harness.records import BARE, COMPILE, EAGER, OURS, CaseResult, Ratio, ratios
from benchmarks.harness.report import Record, Table, number, write_json
from benchmarks.harness.runner import Runner
from benchmarks.kinds import Run

METHOD = (
    "Times of others over ours: above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call; alone: each after a pause. An fp32 weight is packed. Bare is torch.mm alone, or a copy of x."
)
RATIOS = tuple(
    Ratio(f"vs_{name}" + ("_alone" if alone else ""), others, alone=alone)
    for name, others in (("eager", (EAGER,)), ("bare", BARE), ("compile", (COMPILE,)), ("best", ()))
    for alone in (False, True)
)
EAGER_VS_BARE = Ratio("eager_vs_bare", BARE, own=EAGER)


def main(run: Run) -> int:
    """Measure all cases, kept after each; 1 if a result of ours is wrong."""
    folder, real = run.options.output, run.device.type == "cuda"
    cases = problems.select(run.options.cases, run.shapes(), run.settings(), real=real)
    available, absent = run.baselines(baselines.of_kind(LINEAR))
    runner = Runner(run.bench(), available, run.budget)
    run.announce()
    record = Record("bench", run.about, METHOD, dataclasses.asdict(runner.bench.effort), absent, [], {})
    with shown_progress(runner.steps(cases)) as runner.bench.progress:
        for result in runner.run(cases):
            if not any(result is known for known in record.results):
                record.results.append(result)
            if folder:
                write_json(record.full(), folder / "record.json")
    wrong = failures(record.results)
    record.figures = {"cases": {r.case: _figures(r) for r in record.results}, "wrong": wrong}
    record.complete = True
    lines = [f"FAILED: {case}: {why}" for case, why in wrong.items()]
    record.finish(run.console, folder, case_tables(record), [*record.remarks(), *lines])
    run.console.line(f"{len(record.results)} cases; {len(wrong) or 'none'} failed")
    return bool(wrong)


def _figures(result: CaseResult) -> dict[str, Any]:
    """What the summary says of a case."""
    times = {name: round(ms, 5) for name, ms in result.times().items()}
    best = RATIOS[-2].best(result)
    found = ratios(result, (*RATIOS, EAGER_VS_BARE))
    return {"models": result.models, "ms": times, **found, "best": best[1] if best else ""}


def failures(results: Sequence[CaseResult]) -> dict[str, str]:
    """Why results of ours are wrong or missing, by case."""
    found = {r.case: "; ".join(f"{m.title}: {m.why_wrong}" for m in r.failed()) for r in results}
    return {case: why for case, why in found.items() if why}


def case_tables(record: Record) -> list[Table]:
    """Every alternative, and one line per case."""
    rows = []
    for result in record.results:
        figures, ms, alone = record.figures["cases"][result.case], result.times(), result.times(alone=True)
        if OURS not in ms:
            continue
        ratios_ = [
            number(figures.get(f"vs_{name}")) + (f" ({number(value)})" if value else "")
            for name in ("eager", "bare", "compile", "best")
            for value in [figures.get(f"vs_{name}_alone")]
        ]
        time = f"{ms[OURS]:.4g}" + (f" ({alone[OURS]:.4g})" if OURS in alone else "")
        work, unit = (result.flops / 1e9, "TFLOP/s") if result.flops else (result.bytes / 1e6, "GB/s")
        head = [result.case, ", ".join(result.models), time, f"{work / ms[OURS]:.4g} {unit}"]
        rows.append([*head, *ratios_, number(figures.get("eager_vs_bare")), figures["best"]])
    every = [
        [
            result.case,
            m.title,
            group.name,
            number(m.ms(), ".4g"),
            number(m.ms(alone=True), ".4g"),
            f"{m.host_us:.0f}",
            m.why_wrong or "ok" * bool(m.accuracy),
        ]
        for result in record.results
        for group in result.groups
        for m in group.measurements
    ]
    columns = ("case", "model", "ms, in turn (alone)", "rate", "vs eager", "vs bare", "vs compile", "vs best")
    all_columns = ("case", "alternative", "group", "ms in turn", "ms alone", "host us", "check")
    title = "Times of others over ours (above 1: epigemm is faster)"
    return [
        Table("Every alternative", all_columns, every),
        Table(title, (*columns, "eager vs bare", "best"), rows),
    ]
