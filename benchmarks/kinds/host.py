"""What a call costs the host, from Python to the launch: ``python -m benchmarks --host``.

Small GEMMs are shorter on the device than their calls are on the host, which is then what a model waits for. The
shapes are so small that the device is done before the host; whether it was is checked (see `Figure`). Hosts are
noisy, so the least of several rounds counts. On a CPU, where a call returns when it is done, these are the times of
whole calls.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import host as host_cases
from benchmarks.cases.host import HostCase
from benchmarks.harness.report import Record, Table
from benchmarks.kinds import Run
from epigemm.timing import Run as Call
from epigemm.timing import Timer, make_timer

MOST_WAITING = 0.3
LIMITED = "limited_by_gpu"
METHOD = (
    "Microseconds of host time of one call. In each round the variants of a case take turns; a turn is a number of "
    "calls without waiting for the device, few enough that its queue does not fill up. The figure of a round is the "
    "median of its turns; the least of all rounds is recorded. A case is limited by the GPU if the wait for the "
    f"device after a turn takes {MOST_WAITING:.0%} or more of the time of its calls."
)
# Cases, a variant, the one it is compared with, the largest ratio of their times.
WANTED = (
    ("linear_*/bf16", "function", "f_linear", 1.1),
    ("linear_*/fp32", "function", "eager", 1.0),
    ("custom_*", "function", "eager", 1.0),
    ("*", "function", "torch", 1.3),
    ("*", "out", "function", 1.0),
    ("*", "module", "module_eager", 1.0),
    ("train_step/*", "module", "eager", 1.2),
    ("*", "epigemm", "inductor", 1.0),
)


@dataclass(frozen=True)
class HostEffort:
    """How much to measure: rounds, turns of each variant in a round, and calls in a turn."""

    rounds: int = 10
    turns: int = 15
    calls: int = 30


QUICK = HostEffort(rounds=2, turns=3, calls=3)


@dataclass(frozen=True, order=True)
class Figure:
    """One variant in one round, or in one turn.

    Attributes:
        us: microseconds that one call keeps the host.
        waiting: the wait for the device after the calls, as a fraction of their time.
    """

    us: float
    waiting: float


def _turn(run: Call, calls: int, timer: Timer) -> Figure:
    timer.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    called = time.perf_counter()
    timer.synchronize()
    waited = time.perf_counter() - called
    return Figure(1e6 * (called - start) / calls, waited / (called - start))


def _round(case: HostCase, turns: int, calls: int, timer: Timer) -> dict[str, Figure]:
    """The medians of the turns of each variant."""
    found: dict[str, list[Figure]] = {name: [] for name in case.runs}
    with torch.set_grad_enabled(case.gradients):
        for _ in range(turns):
            for name, run in case.runs.items():
                found[name].append(_turn(run, calls, timer))
    return {
        name: Figure(statistics.median(f.us for f in figures), statistics.median(f.waiting for f in figures))
        for name, figures in found.items()
    }


def measure(cases: Sequence[HostCase], effort: HostEffort, timer: Timer) -> dict[str, dict[str, Figure]]:
    """The least of all rounds, by case and variant.

    Every round goes through all cases: what disturbs the host for a second then spoils one round of each of them,
    not all rounds of one.
    """
    for case in cases:
        _round(case, 1, effort.calls, timer)
    rounds = [
        {case.name: _round(case, effort.turns, effort.calls, timer) for case in cases}
        for _ in range(effort.rounds)
    ]
    return {
        case.name: {name: min(found[case.name][name] for found in rounds) for name in case.runs}
        for case in cases
    }


def _case_record(figures: Mapping[str, Figure]) -> dict[str, Any]:
    record: dict[str, Any] = {name: round(figure.us, 3) for name, figure in figures.items()}
    limited = any(figure.waiting >= MOST_WAITING for figure in figures.values())
    return record | ({LIMITED: True} if limited else {})


def main(run: Run) -> int:
    """Measure and show.

    Raises:
        ValueError: a pattern matches no case, or more than one size, or one without K.
    """
    shapes, device = run.shapes(), run.device
    if len(shapes) > 1 or any(shape.k is None for shape in shapes):
        raise ValueError("--host: takes one size, MxNxK")
    names, skipped = host_cases.select(run.options.cases, device)
    run.announce()
    effort = QUICK if run.options.quick else HostEffort()
    cases = [host_cases.make(name, shapes[0] if shapes else None, device) for name in names]
    measured = measure(cases, effort, make_timer(device))
    figures = {
        "shapes": {case.name: str(case.shape) for case in cases},
        "skipped": skipped,
        "cases": {name: _case_record(found) for name, found in measured.items()},
    }
    effort_ = dataclasses.asdict(effort)
    record = Record("host", run.about, METHOD, effort_, {}, [], figures, complete=True)
    remarks = [f"{name}: skipped: {why}" for name, why in skipped.items()]
    remarks += [f"{name}: {what}" for name, what in host_cases.VARIANTS.items()]
    record.finish(run.console, run.options.output, [times_table(figures), ratio_table(figures)], remarks)
    return 0


def times_table(summary: Mapping[str, Any]) -> Table:
    """Microseconds of every variant, with a mark where they are not the host's."""
    measured = [name for name in host_cases.VARIANTS if any(name in c for c in summary["cases"].values())]
    rows = []
    for case, times in summary["cases"].items():
        us = [f"{times[name]:.1f}" if name in times else "-" for name in measured]
        mark = "limited by the GPU" if times.get(LIMITED) else ""
        rows.append([case, summary["shapes"][case], *us, mark])
    return Table("Host microseconds of one call", ("case", "shape", *measured, ""), rows)


def ratio_table(summary: Mapping[str, Any]) -> Table:
    """The ratios that are wanted, with a mark where one is missed."""
    rows = []
    for case, times in summary["cases"].items():
        for pattern, ours, base, most in WANTED:
            if fnmatch.fnmatch(case, pattern) and ours in times and base in times:
                ratio = times[ours] / times[base]
                mark = "missed" if ratio > most else ""
                rows.append([case, f"{ours} / {base}", f"{ratio:.3f}", f"{most:g}", mark])
    return Table("Ratios", ("case", "ratio", "measured", "at most", ""), rows)
