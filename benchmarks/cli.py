"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    cases,
    custom,
    drawn,
    environment,
    grid,
    host,
    models,
    peers,
    plans,
    plots,
    report,
    tables,
)
from benchmarks.cases import PRECISIONS, Case, Setting, Shape
from benchmarks.options import CPU_TIME_BUDGET_S, parse_sweep, parser
from benchmarks.progress import shown_progress
from benchmarks.records import MAX_AUTOTUNE, PlanSweep
from benchmarks.runner import Runner
from epigemm.timing import Effort

OK, WRONG, USAGE = 0, 1, 2
_FIVE_ROUNDS = dataclasses.replace(grid.PLAN_EFFORT, min_ms=0.0, max_rounds=5)


def _rounds(options: argparse.Namespace) -> int | None:
    rounds: int | None = options.rounds
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds: expected at least 1, got {rounds}")
    return rounds


def _effort(options: argparse.Namespace, device: torch.device) -> Effort:
    effort = (
        Effort() if device.type == "cuda" else Effort(rounds=10, max_rounds=40, alone_calls=10, pause_s=0.1)
    )
    if options.random is not None:
        effort = _FIVE_ROUNDS if options.plans else drawn.EFFORT
    elif options.grid:
        effort = grid.PLAN_EFFORT if options.plans else grid.EFFORT
    if options.quick:
        effort = dataclasses.replace(effort, rounds=5, min_ms=5.0, max_rounds=20, pause_s=None)
    if options.plans and not options.grid:
        effort = dataclasses.replace(effort, rounds=10, min_ms=0.0)
    if rounds := _rounds(options):
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
    dtypes = options.dtypes or ["fp32", "bf16"]
    if options.grid:
        precisions, dtypes = options.precision or ["high"], options.dtypes or ["bf16", "fp16", "fp32"]
    chosen = [
        Setting(dtype, precision)
        for dtype in dtypes
        for precision in (precisions if dtype == "fp32" else ["highest"])
    ]
    return list(dict.fromkeys(chosen))


def _layers(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """The (N, K) of sizes of linear problems.

    Raises:
        ValueError: a size without K.
    """
    if any(shape.k is None for shape in shapes):
        raise ValueError("--sizes: --grid takes MxNxK, of which it replaces M")
    return list(dict.fromkeys((shape.n, shape.k or 0) for shape in shapes))


def _select(options: argparse.Namespace, device: torch.device) -> list[Case]:
    if options.fp32:
        if options.cases or options.sizes or options.sweep_m:
            raise ValueError("--fp32: is a selection of its own, without --cases, --sizes and --sweep-m")
        options.dtypes = ["fp32"]
        return cases.fp32_cases(_settings(options, device))
    if options.grid:
        return grid.select(
            options.cases,
            drawn.shapes(options)
            if options.random is not None
            else grid.sizes(
                parse_sweep(options.sweep_m) if options.sweep_m else grid.ROWS,
                _layers([Shape.parse(text) for text in options.sizes]) or grid.LAYERS,
            ),
            _settings(options, device),
        )
    patterns = options.cases or (["linear/bias_relu"] if options.plans else [])
    chosen = cases.select_cases(
        patterns=patterns,
        sizes=[Shape.parse(text) for text in options.sizes],
        sweep_m=parse_sweep(options.sweep_m) if options.sweep_m else [],
        settings=_settings(options, device),
        real=device.type == "cuda",
    )
    if options.plans:
        chosen = [case for case in chosen if case.shape.k and not case.problem.training]
    if not chosen:
        raise ValueError("no case is left: --sizes MxNxK go with linear problems, MxN with elementwise ones")
    return chosen


def _output(options: argparse.Namespace, kind: str, name: str) -> Path | None:
    """Where a kind of file goes: its own option, else ``name`` in the folder of ``--output``, else nowhere."""
    chosen: Path | None = getattr(options, kind)
    return chosen or (options.output / name if options.output else None)


def _json(options: argparse.Namespace) -> Path | None:
    return _output(options, "json", "bench.json")


def _keep(options: argparse.Namespace, record: dict[str, Any]) -> list[Path]:
    if record.get("kind") == models.KIND:
        return _keep_models(options, record)
    if "grid" in record and options.output:
        return grid.write([record], options.output)
    written: list[Path] = []
    if path := _json(options):
        report.write_json(record, path)
        written.append(path)
    if path := _output(options, "csv", "bench.csv"):
        report.write_csv(record, path)
        written.append(path)
    if path := _output(options, "markdown", "bench.md"):
        tables.write_markdown(record, environment.headline(record["environment"]), path)
        written.append(path)
    folder = _output(options, "plots", "")
    return written + (plots.write_plots(record, folder) if folder else [])


def _list(
    console: report.Console, chosen: Sequence[Case], wanted: Sequence[peers.Peer], device: torch.device
) -> int:
    rows = [
        [case.name, ", ".join(case.models), case.problem.formula.formula]
        for case in (cases.fitting(case, device) for case in chosen)
    ]
    console.table(f"{len(rows)} cases on {device}", ["case", "problem", "formula"], rows)
    console.table("peers", ["name", "what"], [[p.name, report.plain(p.absent() or p.title)] for p in wanted])
    return OK


def _sweep_plans(
    console: report.Console,
    options: argparse.Namespace,
    device: torch.device,
    chosen: Sequence[Case],
    run: report.Run,
) -> int:
    sweeps: list[PlanSweep] = []
    record = report.to_record(run)
    with shown_progress(len(chosen)) as progress:
        for index, case in enumerate(chosen, 1):
            sweeps += plans.sweep(case, device, _effort(options, device), options.seed)
            record = report.with_plans(record, sweeps, complete=index == len(chosen))
            if path := _json(options):
                report.write_json(record, path)
            progress(case.name, True)
    if path := _output(options, "markdown", "bench.md"):
        tables.write_markdown(record, environment.headline(record["environment"]), path)
    for sweep in sweeps:
        plans.show(console, sweep, everything=options.all_plans)
    plans.summarise(console, sweeps, tables.plans(record))
    return WRONG if any(sweep.failed for sweep in sweeps) else OK


def _budget(options: argparse.Namespace, device: torch.device) -> float | None:
    if options.time_budget is None and device.type == "cpu":
        return CPU_TIME_BUDGET_S
    budget: float | None = options.time_budget
    return budget


def _sweep_plans_of_grid(
    console: report.Console,
    options: argparse.Namespace,
    device: torch.device,
    chosen: Sequence[Case],
    run: report.Run,
    available: Sequence[peers.Peer],
) -> int:
    effort, budget = _effort(options, device), _budget(options, device)
    sweep = grid.PlanGrid(
        device,
        available,
        effort,
        budget,
        options.seed,
        every_order=options.all_plans,
        checked=not options.unchecked,
    )
    with shown_progress(len(chosen)) as progress:
        sweep.progress = progress
        points = grid.measure_plans(sweep, chosen, run, options.output)
    grid.show_plans(console, points, sweep.left_out)
    return WRONG if any(point.failed for point in points) else OK


def _measure_grid(
    console: report.Console,
    options: argparse.Namespace,
    device: torch.device,
    chosen: Sequence[Case],
    run: report.Run,
    available: Sequence[peers.Peer],
) -> int:
    runner = grid.GridRunner(
        device, available, _effort(options, device), _budget(options, device), options.seed
    )
    with shown_progress(runner.grid_steps(chosen)) as progress:
        runner.progress = progress
        records = grid.measure(runner, chosen, run, options.output)
    grid.show(console, records)
    if options.output:
        for path in grid.write(records, options.output):
            console.line(f"wrote {path}")
    return WRONG if run.failed else OK


def _measure(
    console: report.Console,
    options: argparse.Namespace,
    device: torch.device,
    chosen: Sequence[Case],
    run: report.Run,
    available: Sequence[peers.Peer],
) -> int:
    json_path = _json(options)
    runner = Runner(device, available, _effort(options, device), _budget(options, device), options.seed)
    with shown_progress(runner.steps(chosen)) as progress:
        runner.progress = progress
        run.ceilings = runner.ceilings(_settings(options, device))
        for result, group in runner.run(chosen):
            if not any(result is known for known in run.results):
                run.results.append(result)
            if json_path:
                report.write_json(report.to_record(run), json_path)
            console.group(result, group)
    run.complete = True
    for path in _keep(options, report.to_record(run)):
        console.line(f"wrote {path}")
    console.summary(run)
    return WRONG if run.failed else OK


def _host(console: report.Console, options: argparse.Namespace, device: torch.device) -> int:
    """``--host``: summary.json and host.md in the folder of ``--output``, and tables."""
    shapes = [Shape.parse(text) for text in options.sizes]
    if len(shapes) > 1 or any(shape.k is None for shape in shapes):
        raise ValueError("--host: takes one size, MxNxK")
    effort = host.QUICK if options.quick else host.HostEffort()
    about = environment.describe(device, options.trees)
    headline = environment.headline(about)
    console.line(headline)
    summary = host.run(options.cases, shapes[0] if shapes else None, device, effort, about)
    host.show(console, summary)
    for path in host.write(summary, headline, options.output) if options.output else []:
        console.line(f"wrote {path}")
    return OK


def _models(console: report.Console, options: argparse.Namespace, device: torch.device) -> int:
    """``--models``: models.json, models.md and plots in the folder of ``--output``, and tables."""
    others = ("sizes", "no_peers", "csv", "grid", "plans", "fp32")
    if given := [name for name in others if getattr(options, name)]:
        raise ValueError(f"--models: goes without --{given[0].replace('_', '-')}")
    planned = models.plan(
        models.ModelOptions(
            patterns=options.cases,
            batches=parse_sweep(options.sweep_m) if options.sweep_m else (),
            settings=_settings(options, device),
            names=options.peers,
            exclude=options.exclude,
            quick=options.quick,
            rounds=_rounds(options),
            time_budget_s=options.time_budget,
            seed=options.seed,
            trees=options.trees,
        ),
        device,
    )
    if options.list:
        models.show_selection(console, planned)
        return OK
    record, wrong = models.measure(console, planned, shown_progress, _output(options, "json", "models.json"))
    for path in _keep_models(options, record):
        console.line(f"wrote {path}")
    return WRONG if wrong else OK


def _custom(console: report.Console, options: argparse.Namespace, device: torch.device) -> int:
    """``--custom``: summary.json and custom.md in the folder of ``--output``, and tables."""
    planned = custom.plan(options, device, _effort(options, device), _budget(options, device))
    if options.list:
        return _list(console, planned.cases, planned.runner.peers, device)
    return WRONG if custom.run(console, planned, shown_progress, options.output) else OK


def _random(console: report.Console, options: argparse.Namespace, device: torch.device) -> int:
    """``--random``: summary.json, points.json and points.md in random-SEED, and tables."""
    run = drawn.plan(options, device, _effort(options, device), _budget(options, device))
    console.line(environment.headline(run.about))
    if options.list:
        run.announce(console)
        return OK
    written = run.measure(shown_progress, drawn.folder(options.output, run.about, options.random))
    run.show(console)
    for path in written:
        console.line(f"wrote {path}")
    return WRONG if run.failed else OK


def _keep_models(options: argparse.Namespace, record: dict[str, Any]) -> list[Path]:
    text, folder = _output(options, "markdown", "models.md"), _output(options, "plots", "")
    return models.write(record, text=text, folder=folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    console = report.Console()
    try:
        if options.render:
            for path in _keep(options, json.loads(options.render.read_text())):
                console.line(f"wrote {path}")
            return OK
        drawn.check(options)
        device = _device(options.device)
        if options.no_max_autotune and not options.custom:
            options.exclude.append(MAX_AUTOTUNE)
        if options.layers and (options.sizes or not options.custom):
            raise ValueError("--layers: goes with --custom, and without --sizes")
        if options.custom:
            return _custom(console, options, device)
        if options.host:
            return _host(console, options, device)
        if options.models:
            return _models(console, options, device)
        if options.random is not None and not options.plans:
            return _random(console, options, device)
        options.grid = options.grid or options.random is not None
        chosen = _select(options, device)
        default = (grid.EVERYWHERE if options.plans else grid.PEERS) if options.grid else ()
        names = options.peers or default
        wanted = peers.select_peers(names, options.exclude, only_ours=options.no_peers)
        about = environment.describe(device, options.trees)
        effort = _effort(options, device)
        if options.random is not None:
            options.output = drawn.folder(options.output, about, options.random)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE
    if options.list:
        return _list(console, chosen, wanted, device)
    available, absent = peers.present(wanted)
    run = report.Run(about, dataclasses.asdict(effort), absent)
    console.line(environment.headline(about))
    for name, reason in absent.items():
        console.line(report.plain(f"absent: {name}: {reason}"))
    if options.plans and not options.grid:
        return _sweep_plans(console, options, device, chosen, run)
    measure = (_sweep_plans_of_grid if options.plans else _measure_grid) if options.grid else _measure
    return measure(console, options, device, chosen, run, available)
