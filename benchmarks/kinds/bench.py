"""``make bench``: the five models, ours beside what PyTorch users have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.harness import report
from benchmarks.harness.records import BARE, COMPILE, EAGER, OURS, CaseResult, Ratio, ratios
from benchmarks.harness.report import Console, Record, Table, number, significant
from benchmarks.harness.runner import Runner

KIND = "bench"
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
Progress = Callable[[int], AbstractContextManager[Any]]


@dataclass
class BenchRun:
    """One run."""

    runner: Runner
    cases: Sequence[Case]
    about: Mapping[str, Any]
    absent: Mapping[str, str]
    results: list[CaseResult] = field(default_factory=list)

    def measure(self, progress: Progress, folder: Path | None) -> None:
        """All cases; kept after each."""
        with progress(self.runner.steps(self.cases)) as self.runner.bench.progress:
            for result in self.runner.run(self.cases):
                if not any(result is known for known in self.results):
                    self.results.append(result)
                if folder:
                    report.write_json(self.record().full(), folder / "record.json")

    def record(self, *, complete: bool = False) -> Record:
        """What has been measured."""
        cases = {}
        for result in self.results:
            times = {name: round(ms, 5) for name, ms in result.times().items()}
            found = ratios(result, (*RATIOS, EAGER_VS_BARE))
            best = RATIOS[-2].best(result)
            cases[result.case] = {
                "models": result.models,
                "ms": times,
                **found,
                "best": best[1] if best else "",
            }
        effort = dataclasses.asdict(self.runner.bench.effort)
        figures = {"cases": cases, "wrong": failures(self.results)}
        return Record(KIND, self.about, METHOD, effort, self.absent, self.results, figures, complete)

    def finish(self, console: Console, folder: Path | None) -> int:
        """Tables, files and plots; how many results of ours are wrong."""
        record = self.record(complete=True)
        tables, remarks = case_tables(record), record.remarks()
        written = record.write(folder, tables, remarks) if folder else []
        console.show(tables, [*remarks, *(f"wrote {path}" for path in written)])
        wrong: dict[str, str] = record.figures["wrong"]
        for case, why in wrong.items():
            console.line(f"[bold red]FAILED[/]: {report.plain(f'{case}: {why}')}")
        console.line(f"{len(self.results)} cases; {len(wrong) or 'none'} failed")
        return len(wrong)


def failures(results: Sequence[CaseResult]) -> dict[str, str]:
    """Why results of ours are wrong or missing, by case."""
    found = {r.case: "; ".join(f"{m.title}: {m.why_wrong}" for m in r.failed()) for r in results}
    return {case: why for case, why in found.items() if why}


def throughput(result: CaseResult, ms: float) -> str:
    """TFLOP/s of a case with a product, GB/s of one without."""
    return f"{result.flops / ms / 1e9:.4g} TFLOP/s" if result.flops else f"{result.bytes / ms / 1e6:.4g} GB/s"


def case_tables(record: Record) -> list[Table]:
    """One line per case, then one per alternative."""
    rows = []
    for result in record.results:
        figures, ms, alone = record.figures["cases"][result.case], result.times(), result.times(alone=True)
        if OURS not in ms:
            continue
        both = [
            number(figures.get(f"vs_{name}")) + (f" ({number(value)})" if value else "")
            for name in ("eager", "bare", "compile", "best")
            for value in [figures.get(f"vs_{name}_alone")]
        ]
        time = significant(ms[OURS]) + (f" ({significant(alone[OURS])})" if OURS in alone else "")
        rest = [number(figures.get("eager_vs_bare")), figures["best"]]
        models = ", ".join(result.models)
        rows.append([result.case, models, time, throughput(result, ms[OURS]), *both, *rest])
    columns = ("case", "model", "ms, in turn (alone)", "rate", "vs eager", "vs bare", "vs compile", "vs best")
    every = [
        [
            result.case,
            m.title,
            group.name,
            significant(m.ms()),
            significant(m.ms(alone=True)),
            f"{m.host_us:.0f}",
            m.why_wrong or "ok" * bool(m.accuracy),
        ]
        for result in record.results
        for group in result.groups
        for m in group.measurements
    ]
    all_columns = ("case", "alternative", "group", "ms in turn", "ms alone", "host us", "check")
    return [
        Table("Every alternative", all_columns, every),
        Table(
            "Times of others over ours (above 1: epigemm is faster)",
            (*columns, "eager vs bare", "best"),
            rows,
        ),
    ]
