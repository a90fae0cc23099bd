"""``--custom``: any epilogue from one Python function, against what PyTorch users have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import baselines
from benchmarks.cases import CUSTOM, Case, Shape, short
from benchmarks.cases.custom import LAYERS, SIZES, problems, select
from benchmarks.harness.records import BARE, BUILTIN, COMPILE, MM, OURS, QUACK, CaseResult
from benchmarks.harness.report import Table, number
from benchmarks.kinds import Run, first_call, short_points
from benchmarks.kinds.bench import failures, rounded

METHOD = (
    "Times of others over ours; above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. fp32 is at torch's default precision, our weight packed. The best is the best of eager, "
    "torch.compile, its max-autotune and QuACK, as far as they ran; they get the bias inside F.linear. The bare "
    "product is torch.mm alone, the built-in our own function of the same epilogue. The first call, of GELU with a "
    "bias at 16384x4096x4096 if no size is given, is timed in a fresh process each: torch imported, CUDA initialised, "
    "the function decorated, the weight packed; once with an empty cache, once with what that has left on disk. The "
    "same of torch.compile, if it takes part."
)
# The figures of a case: dtype, against what, and the least that is wanted.
FIGURES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "fp32_vs_best": ("fp32", (), 1.0),
    "bf16_vs_bare": ("bf16", BARE, 0.0),
    "bf16_vs_best": ("bf16", (), 1.0),
    "bf16_vs_quack": ("bf16", (QUACK,), 0.0),
    "fp32_vs_builtin": ("fp32", (BUILTIN,), 0.99),
    "bf16_vs_builtin": ("bf16", (BUILTIN,), 0.99),
}
_FP32_AT_LARGE, _LARGE = 4.0, tuple(f"/{shape}" for shape in SIZES[:2])
MOST_FIRST_S, MOST_CACHED_MS = {"bf16": 1.5, "fp32": 2.5}, 50.0


def figures(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Of every case, both dtypes together: the ratios, the best baseline, milliseconds."""
    found: dict[str, Any] = {"cases": {}, "best": {}, "ms": {}}
    for result in results:
        name = f"{result.problem.partition('/')[2]}/{'x'.join(map(str, result.shape))}"
        for key, (dtype, others, _) in FIGURES.items():
            ratio = result.ratio(others) if dtype == result.dtype else None
            if ratio is not None:
                found["cases"].setdefault(name, {})[key] = ratio
        for key, value in (("best", result.best()), ("ms", rounded(result.times()))):
            if value:
                found[key].setdefault(name, {})[result.dtype] = value
    return found


def layer_figures(results: Sequence[CaseResult], multiprocessors: int) -> dict[str, Any]:
    """The same of layers with a short K, and each 16-bit epilogue against the bare product."""
    found: dict[str, list[short.Point]] = {}
    every = {(f"{CUSTOM}/{name}", str(s)): s for name in short.EPILOGUES for s in short.SETTINGS}
    for result in results:
        setting = every.get((result.problem, result.dtype))
        if setting is not None and {OURS, MM} <= set(result.times()):
            epilogue = result.problem.partition("/")[2]
            case = Case(problems()[epilogue], Shape(*result.shape), setting)
            point = short.Point(case, result.groups[0].us(), OURS)
            found.setdefault(f"{epilogue}/{setting}", []).append(point)
    judged = {name: short_points.summarise(points, multiprocessors) for name, points in found.items()}
    return figures(results) | {"layers": judged}


def main(run: Run) -> int:
    """Measure first calls, then all cases; 1 if anything of ours is wrong."""
    options, device = run.options, run.device
    sizes = list(LAYERS.values()) if options.layers else run.shapes()
    cases = select(options.cases, sizes, options.dtypes, device)
    # On a CPU a compiler takes longer than all the rest.
    slow = [COMPILE] if options.quick and device.type == "cpu" else []
    available, absent = run.baselines(baselines.of_kind(CUSTOM), slow)
    bench = run.bench(pause_s=None)
    method, of_results = METHOD, figures
    if options.layers:
        method = f"{METHOD} {short_points.METHOD}"
        of_results = functools.partial(layer_figures, multiprocessors=run.multiprocessors)
    record = run.record("custom", method, dataclasses.asdict(bench.effort))
    record.absent = absent
    dtypes = list(dict.fromkeys(case.setting.dtype_name for case in cases))
    first, cached = first_call.measure(dtypes, sizes[0] if sizes else None, device)
    record.figures = {"first_call_s": first, "cached_call_ms": cached}
    if COMPILE in {baseline.name for baseline in available}:
        first, cached = first_call.measure(dtypes, sizes[0] if sizes else None, device, COMPILE)
        record.figures |= {"compile_first_call_s": first, "compile_cached_call_ms": cached}
    wrong = run.measure(record, bench, cases, available, of_results, may_stop=True)
    summary = record.summary()
    missed_ = [f"missed: {line}" for line in missed(summary)] if summary["gpu"] else []
    record.finish(tables(summary), [*failures(record), *missed_])
    return wrong


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """One line per case, and the first calls."""
    rows = []
    for name, values in summary["cases"].items():
        best = ", ".join(f"{dtype}: {best}" for dtype, best in summary["best"].get(name, {}).items())
        rows.append([name, *(number(values.get(key)) for key in FIGURES), best])
    title = "Times of others over ours (above 1: ours is faster)"
    calls = [
        [alternative, dtype, f"{seconds:.3f}", f"{summary[f'{prefix}cached_call_ms'][dtype]:.1f}"]
        for alternative, prefix in (("epigemm", ""), ("torch.compile", "compile_"))
        for dtype, seconds in summary.get(f"{prefix}first_call_s", {}).items()
    ]
    columns = ("alternative", "dtype", "nothing cached, s", "from the disk cache, ms")
    found = [
        Table(title, ("case", *FIGURES, "best"), rows),
        Table("The first call of a process", columns, calls),
    ]
    return [*found, short_points.table(summary["layers"])] if "layers" in summary else found


def missed(summary: Mapping[str, Any]) -> list[str]:
    """Figures that miss what is wanted of them."""
    found: list[str] = []
    for name, values in summary["cases"].items():
        for key, (_, _, least) in FIGURES.items():
            if key == "fp32_vs_best" and name.endswith(_LARGE):
                least = _FP32_AT_LARGE
            if values.get(key, least) < least:
                found.append(f"{name}: {key} is {values[key]:.3f}, wanted {least:g}")
    found += short_points.missed(summary.get("layers", {}))
    for dtype, seconds in summary["first_call_s"].items():
        ms = summary["cached_call_ms"][dtype]
        if seconds > MOST_FIRST_S[dtype]:
            found.append(f"first call, {dtype}: {seconds:.2f} s, wanted {MOST_FIRST_S[dtype]:g}")
        if ms > MOST_CACHED_MS:
            found.append(f"first call from the cache, {dtype}: {ms:.1f} ms, wanted {MOST_CACHED_MS:g}")
    return found
