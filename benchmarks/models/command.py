"""What ``--models`` does: measure, keep the record after every point, write tables and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Setting, compile_in_this_process
from benchmarks.harness import environment, report
from benchmarks.models import tables, workloads
from benchmarks.models.alternatives import AOT_EAGER, INDUCTOR, select_alternatives
from benchmarks.models.records import TITLES, ModelResult
from benchmarks.models.runner import QUICK, ModelEffort, ModelRunner, Point, points

KIND = "models"
TIME_BUDGET_S = {"cuda": 240.0, "cpu": 45.0}
METHOD = (
    "Milliseconds of a call as its caller sees it: calls back to back until the device is done, divided by their "
    "number, medians over turns, all alternatives of a line in turn in one process; nothing is flushed between the "
    "calls. On the device: between events, the L2 cache flushed before each call, the host ahead. Inference is under "
    "torch.no_grad(); a training step is forward, backward and SGD's update. The seconds to compile belong to this "
    "run and its caches."
)


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says.

    Attributes:
        patterns: which models; empty: all.
        batches: in place of theirs.
        settings: the arithmetic.
        names: alternatives; empty: all. Less those in `exclude`.
        quick: little effort, and on a CPU no compiler.
        rounds: turns of each alternative; None: by effort.
        time_budget_s: see `ModelRunner`; None: by device.
        trees: see `benchmarks.harness.environment`.
    """

    patterns: Sequence[str]
    batches: Sequence[int]
    settings: Sequence[Setting]
    names: Sequence[str]
    exclude: Sequence[str]
    quick: bool
    rounds: int | None
    time_budget_s: float | None
    seed: int
    trees: str | None


@dataclass
class Plan:
    """What is going to be measured, and by whom."""

    points: list[Point]
    runner: ModelRunner
    environment: dict[str, Any]

    def record(self, results: Sequence[ModelResult], *, complete: bool) -> dict[str, Any]:
        """The run as plain data."""
        plain: dict[str, Any] = report.finite(
            {
                "schema": report.SCHEMA,
                "kind": KIND,
                "complete": complete,
                "environment": self.environment,
                "effort": dataclasses.asdict(self.runner.effort),
                "method": METHOD,
                "compiler": self.runner.compiler,
                "absent": workloads.absent(),
                "left_out": self.runner.left_out,
                "cases": [dataclasses.asdict(result) for result in results],
            }
        )
        return plain


def plan(options: ModelOptions, device: torch.device) -> Plan:
    """Resolve the options.

    Raises:
        ValueError: an unknown model, alternative or tree.
    """
    chosen = workloads.select(options.patterns)
    small = device.type == "cpu"
    effort = QUICK if options.quick else ModelEffort()
    if options.rounds is not None:
        effort = dataclasses.replace(effort, turns=options.rounds)
    compile_in_this_process()
    runner = ModelRunner(
        device,
        select_alternatives(options.names, options.exclude),
        effort,
        AOT_EAGER if small and options.quick else INDUCTOR,
        small=small,
        time_budget_s=TIME_BUDGET_S[device.type] if options.time_budget_s is None else options.time_budget_s,
        seed=options.seed,
    )
    return Plan(
        points(chosen, options.settings, small=small, batches=options.batches),
        runner,
        environment.describe(device, options.trees),
    )


def show_selection(console: report.Console, planned: Plan) -> None:
    """The points and the alternatives, nothing measured."""
    rows = [[p.name, group, p.workload.title] for p, group in planned.runner.schedule(planned.points)]
    console.table(f"{len(rows)} steps on {planned.runner.device}", ["point", "group", "model"], rows)
    names = planned.runner.names
    console.table("alternatives", ["name", "what"], [[name, report.plain(TITLES[name])] for name in names])


def measure(
    console: report.Console,
    planned: Plan,
    progress: Callable[[int], AbstractContextManager[Any]],
    keep: Path | None,
) -> tuple[dict[str, Any], bool]:
    """Measure all points; the record, and whether a result of ours is wrong or missing."""
    console.line(report.plain(environment.headline(planned.environment)))
    results: list[ModelResult] = []
    with progress(len(planned.runner.schedule(planned.points))) as planned.runner.progress:
        for result in planned.runner.run(planned.points):
            if not any(result is known for known in results):
                results.append(result)
            if keep:
                report.write_json(planned.record(results, complete=False), keep)
    record = planned.record(results, complete=True)
    if keep:
        report.write_json(record, keep)
    show(console, record)
    wrong = [(result.case, m) for result in results for m in result.failed()]
    for case, m in wrong:
        console.line(f"[bold red]FAILED[/]: {report.plain(f'{case}: {m.title}: {m.error or m.wrong}')}")
    return record, bool(wrong)


def show(console: report.Console, record: Mapping[str, Any]) -> None:
    """All tables, what was not measured, and last where fusion does not pay."""
    first, *others = tables.tables(record)
    for table in [*others, first]:
        if table.rows:
            rows = [[report.plain(cell) for cell in row] for row in table.rows]
            console.table(report.plain(table.title), table.columns, rows)
    for remark in tables.remarks(record):
        console.line(report.plain(remark))
    console.line(
        f"slower than without fusion: {len(first.rows)} of {len(tables.compared(record))} comparisons"
    )
