"""What a call costs the host, from Python to the launch: ``python -m benchmarks --host``.

Small GEMMs are shorter on the device than their calls are on the host, which is then what a model waits for. The
shapes are so small that the device is done before the host; whether it was is checked (`MOST_WAITING`). Hosts are
noisy, so the least of several rounds counts. On a CPU, where a call returns when it is done, these are the times of
whole calls.
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.cases import host as host_cases
from benchmarks.cases.host import HostCase
from benchmarks.harness.report import Table
from benchmarks.harness.timing import make_timer
from benchmarks.kinds import Run
from epigemm.tuner.timing import Run as Call
from epigemm.tuner.timing import Timer

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
    ("linear_*/bf16", "site", "f_linear", 1.13),  # 2 us more than F.linear's 15 us on the host of an H100
    ("linear_*/fp32", "function", "eager", 1.0),
    ("custom_*", "function", "eager", 1.0),
    ("call/*", "function", "eager", 1.2),
    ("*", "function", "torch", 1.3),
    ("*", "out", "function", 1.0),
    ("*", "module", "module_eager", 1.0),
    ("train_step/*", "module", "eager", 1.2),
    ("*", "epigemm", "inductor", 1.0),
)


# Rounds, turns of each variant in a round, and calls in a turn.
EFFORT, QUICK = {"rounds": 10, "turns": 15, "calls": 30}, {"rounds": 2, "turns": 3, "calls": 3}
Figure = tuple[float, float]
"""Microseconds that one call keeps the host; the wait for the device after the calls, as a fraction of their time."""


def _turn(run: Call, calls: int, timer: Timer) -> Figure:
    timer.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    called = time.perf_counter()
    timer.synchronize()
    waited = time.perf_counter() - called
    return 1e6 * (called - start) / calls, waited / (called - start)


def _round(case: HostCase, turns: int, calls: int, timer: Timer) -> dict[str, list[Figure]]:
    """The turns of each variant."""
    found: dict[str, list[Figure]] = {name: [] for name in case.runs}
    with torch.set_grad_enabled(case.gradients):
        for _ in range(turns):
            for name, run in case.runs.items():
                found[name].append(_turn(run, calls, timer))
    return found


def recorded(rounds: Sequence[Mapping[str, Sequence[Figure]]]) -> dict[str, Any]:
    """Of a case's variants the least of the rounds' medians, and whether the case is limited by the GPU."""
    least = {
        name: min(tuple(map(statistics.median, zip(*each[name], strict=True))) for each in rounds)
        for name in rounds[0]
    }
    is_limited = any(waiting >= MOST_WAITING for _, waiting in least.values())
    return {name: round(us, 3) for name, (us, _) in least.items()} | ({LIMITED: True} if is_limited else {})


def measure(
    cases: Sequence[HostCase], timer: Timer, *, rounds: int, turns: int, calls: int
) -> dict[str, dict[str, Any]]:
    """The least of all rounds, by case and variant, and whether a case is limited by the GPU.

    Every round goes through all cases: what disturbs the host for a second then spoils one round of each of them,
    not all rounds of one.
    """
    for case in cases:
        _round(case, 1, calls, timer)
    found = [[_round(case, turns, calls, timer) for case in cases] for _ in range(rounds)]
    return {case.name: recorded(of) for case, of in zip(cases, zip(*found, strict=True), strict=True)}


def main(run: Run) -> int:
    """Measure and show.

    Raises:
        ValueError: a pattern matches no case, or more than one size, or one without K.
    """
    shapes, device = run.shapes(), run.device
    if len(shapes) > 1 or any(shape.k is None for shape in shapes):
        raise ValueError("--host: takes one size, MxNxK")
    names, skipped = host_cases.select(run.options.cases, device)
    effort = QUICK if run.options.quick else EFFORT
    record = run.record("host", METHOD, effort)
    cases = [host_cases.make(name, shapes[0] if shapes else None, device) for name in names]
    record.figures = {
        "shapes": {case.name: str(case.shape) for case in cases},
        "skipped": skipped,
        "cases": measure(cases, make_timer(device), **effort),
    }
    remarks = [f"{name}: skipped: {why}" for name, why in skipped.items()]
    remarks += [f"{name}: {what}" for name, what in host_cases.VARIANTS.items()]
    record.finish([times_table(record.figures), ratio_table(record.figures)], remarks)
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
