"""``make bench``: the five models, ours beside what PyTorch users have; other problems by ``--cases``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.baselines import BASELINES
from benchmarks.cases import DTYPES, problems
from benchmarks.cases.short import BYTES_PER_US
from benchmarks.harness.plots import speedups
from benchmarks.harness.records import BARE, BUILTIN, COMPILE, EAGER, MM, OURS, CaseResult
from benchmarks.harness.report import Record, Table, number, show
from benchmarks.kinds import Run

METHOD = (
    "Times of others over ours: above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. An fp32 weight is packed. Bare is torch.mm alone, or a copy of x; of a pair of products it "
    "is torch.mm of all rows of both weights. A baseline of an epilogue in Python gets the bias inside F.linear. "
    "The bound, of a layer with BatchNorm in training in 16 bits, is torch.mm and one pass that reads the product and "
    "writes the result, at 4.3 TB/s."
)
VERSUS = {"eager": (EAGER,), "bare": BARE, "compile": (COMPILE,), "builtin": (BUILTIN,), "best": ()}


def main(run: Run) -> int:
    """Measure all cases; 1 if a result of ours is wrong."""
    real = run.device.type == "cuda"
    cases = problems.select(run.options.cases, run.shapes(), run.settings(), real=real)
    available, absent = run.baselines(list(BASELINES.values()))
    bench = run.bench()
    record = run.record("bench", METHOD, dataclasses.asdict(bench.effort))
    record.absent = absent
    wrong = run.measure(record, bench, cases, available, figures)
    record.finish(tables(record), failures(record), speedups)
    show([], [f"{len(record.results)} cases; {len(record.figures['wrong']) or 'none'} failed"])
    return wrong


def failures(record: Record) -> list[str]:
    """What is wrong, for people."""
    return [f"FAILED: {case}: {why}" for case, why in record.figures["wrong"].items()]


def figures(results: Sequence[CaseResult]) -> dict[str, Any]:
    """What the summary says of the cases."""
    found: dict[str, Any] = {}
    for result in results:
        ratios = {f"vs_{name}": result.ratio(others) for name, others in VERSUS.items()}
        ratios["eager_vs_bare"] = result.ratio(BARE, own=EAGER)
        found[result.case] = {"models": result.models, "ms": rounded(result.times())}
        found[result.case] |= {key: ratio for key, ratio in ratios.items() if ratio is not None}
        found[result.case]["best"] = result.best()
        found[result.case] |= bound(result)
    return {"cases": found}


def bound(result: CaseResult) -> dict[str, float]:
    """The least time that BatchNorm's statistics allow where torch.mm has the product's arithmetic, and it over ours.

    The statistics are known when the whole product is, so a second pass normalises it. fp32 has no such bound: there
    epigemm's product takes less time than torch.mm.
    """
    times = result.times()
    if not result.problem.endswith(":train") or result.dtype == "fp32" or not {MM, OURS} <= set(times):
        return {}
    m, n, *_ = result.shape
    second_pass = 2 * m * n * DTYPES[result.dtype].itemsize
    least = times[MM] + second_pass / BYTES_PER_US / 1e3
    return {"bound_ms": round(least, 5), "vs_bound": round(least / times[OURS], 4)}


def rounded(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds as summaries hold them."""
    return {name: round(ms, 5) for name, ms in times.items()}


def tables(record: Record) -> list[Table]:
    """Every alternative, and one line per case."""
    every, rows = [], []
    for result in record.results:
        for m in result.measurements.values():
            ms = number(m.in_turn.median_ms if m.in_turn else None, ".4g")
            check = m.why_wrong or "ok" * bool(m.accuracy)
            every.append([result.case, m.title, ms, f"{m.host_us:.0f}", check])
        found, times = record.figures["cases"][result.case], result.times()
        if OURS not in times:
            continue
        work, unit = (result.flops / 1e9, "TFLOP/s") if result.flops else (result.bytes / 1e6, "GB/s")
        ratios = [number(found.get(f"vs_{name}")) for name in VERSUS]
        head = [
            result.case,
            ", ".join(result.models),
            f"{times[OURS]:.4g}",
            f"{work / times[OURS]:.4g} {unit}",
        ]
        others = [number(found.get(name)) for name in ("eager_vs_bare", "vs_bound")]
        rows.append([*head, *ratios, *others, found["best"]])
    columns = ("case", "model", "ms", "rate", *(f"vs {name}" for name in VERSUS))
    all_columns = ("case", "alternative", "ms", "host us", "check")
    title = "Times of others over ours (above 1: epigemm is faster)"
    return [
        Table("Every alternative", all_columns, every),
        Table(title, (*columns, "eager vs bare", "vs bound", "best"), rows),
    ]
