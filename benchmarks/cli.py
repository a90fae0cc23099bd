"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.baselines import Baseline
from benchmarks.cases import CUSTOM, LINEAR, PRECISIONS, Case, Setting, Shape, custom, problems
from benchmarks.cases import random as drawn
from benchmarks.harness import environment, plots
from benchmarks.harness.progress import shown_progress
from benchmarks.harness.records import COMPILE, MAX_AUTOTUNE
from benchmarks.harness.report import Console, plain
from benchmarks.harness.runner import Bench, Budget, Runner
from benchmarks.kinds import host, plans, random, tune
from benchmarks.kinds.bench import BenchRun
from benchmarks.kinds.custom import CustomRun
from benchmarks.models import run as whole
from benchmarks.options import CPU_TIME_BUDGET_S, kind_of, parser
from epigemm.timing import Effort

OK, WRONG, USAGE = 0, 1, 2


def _effort(options: argparse.Namespace, device: torch.device, kind: str) -> Effort:
    effort = (
        Effort() if device.type == "cuda" else Effort(rounds=10, max_rounds=40, alone_calls=10, pause_s=0.1)
    )
    effort = {"random": random.EFFORT, "plans": plans.EFFORT}.get(kind, effort)
    if kind == "custom":
        effort = dataclasses.replace(effort, pause_s=None)
    if options.quick:
        effort = dataclasses.replace(effort, rounds=5, min_ms=5.0, max_rounds=20, pause_s=None)
    if rounds := options.rounds:
        effort = dataclasses.replace(effort, rounds=rounds, max_rounds=max(rounds, effort.max_rounds))
    return effort


def _device(name: str) -> torch.device:
    """The device asked for, else a GPU where there is one.

    Raises:
        ValueError: neither a CPU nor a GPU that torch sees.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device: expected cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device: got {name!r}, but torch sees {count} GPUs")
        torch.cuda.set_device(device.index or 0)
    return device


def _settings(options: argparse.Namespace, device: torch.device) -> list[Setting]:
    precisions = options.precision or (PRECISIONS if device.type == "cuda" else PRECISIONS[:1])
    chosen = [
        Setting(dtype, precision)
        for dtype in options.dtypes or ["fp32", "bf16"]
        for precision in (precisions if dtype == "fp32" else ["highest"])
    ]
    return list(dict.fromkeys(chosen))


def _shapes(options: argparse.Namespace) -> list[Shape]:
    """Of ``--sizes``, or random ones."""
    if options.random is None:
        return [Shape.parse(text) for text in options.sizes]
    between = drawn.between(options.random) if options.between else []
    return drawn.draw(options.random, options.count) + between


def _budget(options: argparse.Namespace, device: torch.device) -> float | None:
    if options.time_budget is None and device.type == "cpu":
        return CPU_TIME_BUDGET_S
    budget: float | None = options.time_budget
    return budget


@dataclasses.dataclass
class _Run:
    """What every kind of record starts from."""

    console: Console
    options: argparse.Namespace
    device: torch.device
    kind: str

    def __post_init__(self) -> None:
        options, device = self.options, self.device
        self.about = environment.describe(device, options.trees)
        self.effort = _effort(options, device, self.kind)
        self.budget = _budget(options, device)
        self.output: Path | None = options.output

    def bench(self) -> Bench:
        """Timer and steps."""
        return Bench(self.device, self.effort, self.options.seed)

    def baselines(
        self, among: Sequence[Baseline], exclude: Sequence[str] = ()
    ) -> tuple[list[Baseline], dict[str, str]]:
        """Those that take part, and why others do not."""
        options = self.options
        known = {baseline.name for baseline in among}
        if options.no_max_autotune:
            exclude = [*exclude, *({MAX_AUTOTUNE} & known)]
        chosen = baselines.select(among, options.peers, [*options.exclude, *exclude])
        available, absent = baselines.present(chosen)
        left_out = known - {baseline.name for baseline in chosen}
        return available, absent | {
            b.name: "left out on the command line" for b in among if b.name in left_out
        }

    def announce(self) -> None:
        """The machine."""
        self.console.line(plain(environment.headline(self.about)))

    def list(self, chosen: Sequence[Case], wanted: Sequence[Baseline]) -> int:
        """Cases and alternatives, nothing measured."""
        rows = [[case.name, ", ".join(case.models), case.problem.formula] for case in chosen]
        self.console.table(f"{len(rows)} cases on {self.device}", ["case", "model", "formula"], rows)
        titles = [[b.name, plain(b.absent() or b.title)] for b in wanted]
        self.console.table("peers", ["name", "what"], titles)
        return OK


def _bench(run: _Run) -> int:
    options, device = run.options, run.device
    real, shapes = device.type == "cuda", _shapes(options)
    cases = problems.select(options.cases, shapes, _settings(options, device), real=real)
    available, absent = run.baselines(baselines.of_kind(LINEAR))
    if options.list:
        return run.list(cases, available)
    run.announce()
    measured = BenchRun(Runner(run.bench(), available, run.budget), cases, run.about, absent)
    measured.measure(shown_progress, run.output)
    return WRONG if measured.finish(run.console, run.output) else OK


def _custom(run: _Run) -> int:
    options, device = run.options, run.device
    sizes = list(custom.LAYERS.values()) if options.layers else _shapes(options)
    cases = custom.select(options.cases, sizes, options.dtypes or (), device)
    # On a CPU a compiler takes longer than all the rest.
    slow = [COMPILE] if options.quick and device.type == "cpu" else []
    available, absent = run.baselines(baselines.of_kind(CUSTOM), slow)
    if options.list:
        return run.list(cases, available)
    run.announce()
    runner = Runner(run.bench(), available, run.budget, limits_all=True)
    measured = CustomRun(runner, cases, sizes[0] if sizes else None, run.about, absent)
    return WRONG if measured.run(run.console, shown_progress, run.output) else OK


def _random(run: _Run) -> int:
    options = run.options
    # On a CPU, Inductor calls a C++ compiler for every case.
    skip = [COMPILE] if run.device.type == "cpu" and not options.peers else []
    available, absent = run.baselines([baselines.BASELINES[n] for n in ("epigemm", *random.NAMES)], skip)
    measured = random.RandomRun(
        random.Drawing(run.bench(), available, Budget(run.budget)),
        drawn.select(options.cases, count=options.count, between=options.between),
        run.about,
        absent,
        options.random,
        options.count,
        options.between,
    )
    run.announce()
    if options.list:
        run.console.show([measured.list_table()], measured.remarks())
        return OK
    written = measured.measure(shown_progress, random.folder(run.output, run.about, options.random))
    run.console.show(measured.tables(), [*measured.remarks(), *(f"wrote {path}" for path in written)])
    return WRONG if any(point.wrong for point in measured.points) else OK


def _host(run: _Run) -> int:
    shapes = _shapes(run.options)
    if len(shapes) > 1 or any(shape.k is None for shape in shapes):
        raise ValueError("--host: takes one size, MxNxK")
    effort = host.QUICK if run.options.quick else host.HostEffort()
    record = host.run(run.options.cases, shapes[0] if shapes else None, run.device, effort, run.about)
    summary = record.summary()
    tables, remarks = host.tables(summary), host.remarks(summary)
    written = record.write(run.output, tables, remarks) if run.output else []
    run.announce()
    run.console.show(tables, [*remarks, *(f"wrote {path}" for path in written)])
    return OK


def _plans(run: _Run) -> int:
    options, device = run.options, run.device
    if device.type != "cuda":
        raise ValueError("--plans: needs a GPU")
    cases = plans.select(options.cases, _shapes(options), _settings(options, device))
    sweep = plans.PlanSweep(
        device, run.effort, Budget(run.budget), options.seed, checked=not options.unchecked
    )
    with shown_progress(len(cases)) as sweep.progress:
        points = plans.measure(sweep, cases, run.about, run.output)
    run.announce()
    run.console.show([plans.table(points)], [f"{name}: {why}" for name, why in sweep.budget.left_out.items()])
    return WRONG if any(point.failed for point in points) else OK


def _tune(run: _Run) -> int:
    record = tune.run(_shapes(run.options), run.device, run.about)
    tables = [tune.table(record.figures["cases"])]
    written = record.write(run.output, tables) if run.output else []
    run.announce()
    run.console.show(tables, [f"wrote {path}" for path in written])
    return OK


def _models(run: _Run) -> int:
    options, device = run.options, run.device
    models = whole.Run(whole.select(options.cases), device, quick=options.quick or device.type == "cpu")
    if options.list:
        rows = [[str(case)] for case in models.cases()]
        run.console.table(f"{len(rows)} cases on {device}", ["case"], rows)
        return OK
    run.announce()
    with shown_progress(len(models.cases())) as progress:

        def keep(case: str, result: Mapping[str, Any]) -> None:
            ratios = f"fuse {result['fuse_vs_eager']:.3f}, backend {result['backend_vs_compile']:.3f}"
            progress(f"{case}: {ratios}{'' if result['right'] else ', WRONG'}", True)
            if run.output:
                models.record(run.about, complete=False).write(run.output)

        budget = whole.TIME_BUDGET_S if options.time_budget is None else options.time_budget
        models.measure(budget, keep)
    tables, remarks = models.tables(), models.remarks()
    record = models.record(run.about, complete=True)
    written = record.write(run.output, tables, remarks) if run.output else []
    run.console.show(tables, [*remarks, *(f"wrote {path}" for path in written)])
    return WRONG if models.wrong or models.failed else OK


def _render(console: Console, options: argparse.Namespace) -> int:
    """Plots from a record."""
    if options.output is None:
        raise ValueError("--render: goes with --output DIR")
    for path in plots.write_plots(json.loads(options.render.read_text()), options.output):
        console.line(f"wrote {path}")
    return OK


_KINDS: dict[str, Callable[[_Run], int]] = {
    "": _bench,
    "custom": _custom,
    "random": _random,
    "host": _host,
    "models": _models,
    "plans": _plans,
    "tune": _tune,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        if options.render:
            return _render(console, options)
        kind = kind_of(options)
        return _KINDS[kind](_Run(console, options, _device(options.device), kind))
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE
