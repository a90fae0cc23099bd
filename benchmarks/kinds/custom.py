"""``--custom``: any epilogue from one Python function, against what PyTorch users have.

Every result of ours is held against float64 before anything is timed, and again, with the baselines', before its case
is. One that is wrong ends the run, and no figure is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import baselines
from benchmarks.cases import CUSTOM, Case, Shape
from benchmarks.cases.custom import LAYERS, SIZES, select
from benchmarks.harness.progress import shown_progress
from benchmarks.harness.records import BARE, BUILTIN, COMPILE, CaseResult, Ratio, ratios
from benchmarks.harness.report import Record, Table
from benchmarks.harness.runner import Runner
from benchmarks.kinds import Run, first_call
from benchmarks.kinds.bench import failures

METHOD = (
    "Times of others over ours; above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. fp32 is at torch's default precision, our weight packed. The best is the best of eager, "
    "torch.compile, its max-autotune and QuACK, as far as they ran; they get the bias inside F.linear. The bare "
    "product is torch.mm alone, the built-in our own function of the same epilogue. Milliseconds are of the first "
    "group in which an alternative ran: ratios are taken within a group. The first call, of GELU with a bias at "
    "16384x4096x4096 if no size is given, is timed in a fresh process each: torch imported, CUDA initialised, the "
    "function decorated, the weight packed; once with an empty cache, once with what that has left on disk."
)
RATIOS = (
    Ratio("fp32_vs_best", dtypes=("fp32",), least=1.0),
    Ratio("bf16_vs_bare", BARE, dtypes=("bf16",)),
    Ratio("bf16_vs_best", dtypes=("bf16",), least=1.0),
    Ratio("fp32_vs_builtin", (BUILTIN,), dtypes=("fp32",), least=0.99),
    Ratio("bf16_vs_builtin", (BUILTIN,), dtypes=("bf16",), least=0.99),
)
FIGURES = tuple(ratio.key for ratio in RATIOS)
_BEST = Ratio("best")
_LEAST_AT_LARGE = {"fp32_vs_best": 4.0}
_LARGE = tuple(f"/{shape}" for shape in SIZES[:2])
MOST_FIRST_S, MOST_CACHED_MS = {"bf16": 1.5, "fp32": 2.5}, 50.0


def case_name(result: CaseResult) -> str:
    """``NAME/MxNxK``: what the summary calls it, whatever the dtype."""
    return f"{result.problem.partition('/')[2]}/{result.size}"


def figures(results: Sequence[CaseResult]) -> dict[str, dict[str, float]]:
    """The ratios of every case that has any, both dtypes together."""
    found: dict[str, dict[str, float]] = {}
    for result in results:
        if values := ratios(result, RATIOS):
            found.setdefault(case_name(result), {}).update(values)
    return {name: {key: of[key] for key in FIGURES if key in of} for name, of in found.items()}


def _by_dtype(values: Sequence[tuple[CaseResult, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for result, value in values:
        if value:
            found.setdefault(case_name(result), {})[result.dtype] = value
    return found


def best(results: Sequence[CaseResult]) -> dict[str, dict[str, str]]:
    """The best baseline's name, by case and dtype."""
    names = ((result, _BEST.best(result)) for result in results)
    return _by_dtype([(result, found[1] if found else "") for result, found in names])


def main(run: Run) -> int:
    """Check all, then measure all, kept after each step; 1 and no figure if anything of ours is wrong."""
    options, device, folder = run.options, run.device, run.options.output
    sizes = list(LAYERS.values()) if options.layers else run.shapes()
    cases = select(options.cases, sizes, options.dtypes or (), device)
    # On a CPU a compiler takes longer than all the rest.
    slow = [COMPILE] if options.quick and device.type == "cpu" else []
    available, absent = run.baselines(baselines.of_kind(CUSTOM), slow)
    runner = Runner(run.bench(), available, run.budget, limits_all=True)
    runner.bench.effort = dataclasses.replace(runner.bench.effort, pause_s=None)
    run.announce()
    record = Record("custom", run.about, METHOD, dataclasses.asdict(runner.bench.effort), absent, [], {})
    if wrong := _measure(runner, cases, sizes[0] if sizes else None, record, folder):
        for name in ("summary.json", "record.json") if folder and record.figures else ():
            (folder / name).unlink(missing_ok=True)
        run.console.show([], [f"FAILED: {case}: {why}" for case, why in wrong.items()])
        return 1
    record.complete = True
    summary = record.summary()
    misses = [f"missed: {line}" for line in missed(summary)] if summary["gpu"] else []
    tables = [case_table(summary), call_table(summary)]
    record.finish(run.console, folder, tables, [*misses, *record.remarks()])
    return 0


def _measure(
    runner: Runner, cases: Sequence[Case], shape: Shape | None, record: Record, folder: Path | None
) -> dict[str, str]:
    """Fill the record; what is wrong, by case, if anything is."""
    bench = runner.bench
    dtypes = list(dict.fromkeys(case.setting.dtype_name for case in cases))
    with shown_progress(len(cases) + runner.steps(cases)) as bench.progress:
        if wrong := failures(list(runner.check(cases))):
            return wrong
        bench.progress("the first call of a process", False)
        try:
            first, cached = first_call.measure(dtypes, shape, bench.device)
        except first_call.FirstCallError as error:
            return {"first call": str(error)}
        record.figures = {"first_call_s": first, "cached_call_ms": cached, "cases": {}, "best": {}, "ms": {}}
        for result in runner.run(cases):
            if wrong := failures([result]):
                return wrong
            if not any(result is known for known in record.results):
                record.results.append(result)
            times = [(r, {name: round(ms, 5) for name, ms in r.times().items()}) for r in record.results]
            found = {"cases": figures(record.results), "best": best(record.results), "ms": _by_dtype(times)}
            record.figures |= found
            if folder:
                record.write(folder)
    return {}


def case_table(summary: Mapping[str, Any]) -> Table:
    """One line per case."""
    rows = [
        [
            name,
            *(f"{values[key]:.3f}" if key in values else "-" for key in FIGURES),
            ", ".join(f"{dtype}: {best}" for dtype, best in summary["best"].get(name, {}).items()),
        ]
        for name, values in summary["cases"].items()
    ]
    return Table("Times of others over ours (above 1: ours is faster)", ("case", *FIGURES, "best"), rows)


def call_table(summary: Mapping[str, Any]) -> Table:
    """The first calls."""
    rows = [
        [dtype, f"{seconds:.3f}", f"{summary['cached_call_ms'][dtype]:.1f}"]
        for dtype, seconds in summary["first_call_s"].items()
    ]
    columns = ("dtype", "nothing cached, s", "from the disk cache, ms")
    return Table("The first call of a process", columns, rows)


def missed(summary: Mapping[str, Any]) -> list[str]:
    """Figures that miss what is wanted of them."""
    found: list[str] = []
    for name, values in summary["cases"].items():
        for ratio in RATIOS:
            least = ratio.least
            if name.endswith(_LARGE):
                least = _LEAST_AT_LARGE.get(ratio.key, least)
            if least is not None and ratio.key in values and values[ratio.key] < least:
                found.append(f"{name}: {ratio.key} is {values[ratio.key]:.3f}, wanted {least:g}")
    for dtype, seconds in summary["first_call_s"].items():
        if seconds > MOST_FIRST_S[dtype]:
            found.append(f"first call, {dtype}: {seconds:.2f} s, wanted {MOST_FIRST_S[dtype]:g}")
        if summary["cached_call_ms"][dtype] > MOST_CACHED_MS:
            ms = summary["cached_call_ms"][dtype]
            found.append(f"first call from the cache, {dtype}: {ms:.1f} ms, wanted {MOST_CACHED_MS:g}")
    return found
