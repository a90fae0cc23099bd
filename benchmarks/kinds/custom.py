"""``--custom``: any epilogue from one Python function, against what PyTorch users have.

Every result of ours is held against float64 before anything is timed, and again, with the baselines', before its case
is. One that is wrong ends the run, and no figure is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Shape
from benchmarks.cases.custom import SIZES
from benchmarks.harness import report
from benchmarks.harness.records import BARE, BUILTIN, CaseResult, Ratio, ratios
from benchmarks.harness.report import Console, Record, Table
from benchmarks.harness.runner import Runner
from benchmarks.kinds import first_call
from benchmarks.kinds.bench import failures

KIND = "custom"
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


@dataclass
class CustomRun:
    """One run: what is measured, by whom, and what has come out."""

    runner: Runner
    cases: Sequence[Case]
    shape: Shape | None
    about: Mapping[str, Any]
    absent: Mapping[str, str]
    first_call_s: dict[str, float] = field(default_factory=dict)
    cached_call_ms: dict[str, float] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)

    def record(self, *, complete: bool) -> Record:
        """What has been measured."""
        times = [(r, {name: round(ms, 5) for name, ms in r.times().items()}) for r in self.results]
        found = {
            "first_call_s": self.first_call_s,
            "cached_call_ms": self.cached_call_ms,
            "cases": figures(self.results),
            "best": best(self.results),
            "ms": _by_dtype(times),
        }
        effort = dataclasses.asdict(self.runner.bench.effort)
        return Record(KIND, self.about, METHOD, effort, self.absent, self.results, found, complete)

    def measure(
        self, progress: Callable[[int], AbstractContextManager[Any]], folder: Path | None
    ) -> dict[str, str]:
        """Check all, then measure all, kept after each step; what is wrong, by case, if anything is."""
        bench = self.runner.bench
        dtypes = list(dict.fromkeys(case.setting.dtype_name for case in self.cases))
        with progress(len(self.cases) + self.runner.steps(self.cases)) as bench.progress:
            if wrong := failures(list(self.runner.check(self.cases))):
                return wrong
            bench.progress("the first call of a process", False)
            try:
                first, cached = first_call.measure(dtypes, self.shape, bench.device)
            except first_call.FirstCallError as error:
                return {"first call": str(error)}
            self.first_call_s.update(first)
            self.cached_call_ms.update(cached)
            for result in self.runner.run(self.cases):
                if wrong := failures([result]):
                    for name in ("summary.json", "record.json") if folder else ():
                        (folder / name).unlink(missing_ok=True)  # type: ignore[operator]
                    return wrong
                if not any(result is known for known in self.results):
                    self.results.append(result)
                if folder:
                    self.record(complete=False).write(folder)
        return {}

    def run(
        self,
        console: Console,
        progress: Callable[[int], AbstractContextManager[Any]],
        folder: Path | None,
    ) -> dict[str, str]:
        """Measure, show, write; what is wrong, if anything is, and then no figure."""
        if wrong := self.measure(progress, folder):
            for case, why in wrong.items():
                console.line(f"[bold red]FAILED[/]: {report.plain(f'{case}: {why}')}")
            return wrong
        record = self.record(complete=True)
        summary = record.summary()
        tables = [case_table(summary), call_table(summary)]
        misses = [f"missed: {line}" for line in missed(summary)] if summary["gpu"] else []
        remarks = [*misses, *record.remarks()]
        written = record.write(folder, tables, remarks) if folder else []
        console.show(tables, [*remarks, *(f"wrote {path}" for path in written)])
        return {}


def case_table(summary: Mapping[str, Any]) -> Table:
    """One line per case."""
    rows = [
        [
            name,
            *(f"{values[key]:.3f}" if key in values else "-" for key in FIGURES),
            ", ".join(f"{dtype}: {rival}" for dtype, rival in summary["best"].get(name, {}).items()),
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
