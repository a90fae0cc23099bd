"""``--tune``: what `epigemm.tune` does to calls at random shapes: their time before and after, and its seconds.

Each call is timed with the cost models' plan and with the tuned one, by turns, four times each; device time, L2
flushed, the host hidden. A ratio above 1 means that tuning made the call faster.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import epigemm
from benchmarks.baselines import our_call
from benchmarks.cases import Case, Setting, make_data
from benchmarks.cases.problems import problems
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Table
from benchmarks.kinds import Run
from epigemm import tables
from epigemm._native import ops
from epigemm.timing import Effort, Timer, make_timer

METHOD = " ".join(str(__doc__).split("\n\n")[1].split())
_EFFORT = Effort(rounds=11, min_ms=0.0, max_rounds=11)
_TURNS = 4
_KINDS = (
    ("linear/bias_relu", Setting("bf16", "highest")),
    ("linear/sigmoid_scale_residual", Setting("bf16", "highest")),
    ("linear/bias_relu", Setting("fp32", "highest")),
)


def _median_us(timer: Timer, function: Callable[..., Tensor], arguments: Sequence[Any]) -> float:
    host_us = timer.warm_up(lambda: function(*arguments))
    return 1e3 * statistics.median(timer.in_turn([lambda: function(*arguments)], _EFFORT, host_us)[0])


def _measure(case: Case, timer: Timer) -> dict[str, Any]:
    """One call before and after `tune`."""
    function, arguments = our_call(case, make_data(case, timer.device, 0), packed=False)
    function(*arguments)
    timer.synchronize()
    started = time.monotonic()
    found = epigemm.tune(function, *arguments)
    seconds = time.monotonic() - started
    before, after = [], []
    index = timer.device.index or 0
    for _ in range(_TURNS):
        ops._clear_measured(index)
        before.append(_median_us(timer, function, arguments))
        tables.install(index, found.entries)
        after.append(_median_us(timer, function, arguments))
    return {
        "before_us": statistics.median(before),
        "after_us": statistics.median(after),
        "ratio": statistics.median(before) / statistics.median(after),
        "tune_seconds": seconds,
        "candidates": len(found.candidates),
        "chosen": [dataclasses.asdict(each) for each in found.candidates if each.chosen],
    }


def main(run: Run) -> int:
    """Tune calls of three kinds by turns.

    Raises:
        ValueError: not on a GPU.
    """
    if run.device.type != "cuda":
        raise ValueError("--tune: needs a GPU")
    # What is measured here is not left to later processes of this user.
    os.environ["EPIGEMM_CACHE_DIR"] = tempfile.mkdtemp(prefix="epigemm-tune-")
    by_name = {problem.name: problem for problem in problems()}
    timer = make_timer(run.device)
    record = run.record("tune", METHOD, dataclasses.asdict(_EFFORT))
    cases: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for index, shape in enumerate(run.shapes()):
            name, setting = _KINDS[index % len(_KINDS)]
            case = Case(by_name[name], shape, setting)
            cases[case.name] = _measure(case, timer)
    found = [case["ratio"] for case in cases.values()]
    most = max(case["tune_seconds"] for case in cases.values())
    record.figures = {"geomean": geomean(found), "worst": min(found), "most_seconds": most, "cases": cases}
    forms = {"before_us": ".1f", "after_us": ".1f", "ratio": ".3f", "tune_seconds": ".2f"}
    rows = [[name, *(format(case[key], form) for key, form in forms.items())] for name, case in cases.items()]
    record.finish([Table("tune", ("call", "us before", "us after", "ratio", "seconds"), rows)])
    return 0
