"""``--contest fp8`` and ``--contest experts``: ours and PyTorch's in turn, at models' and at random sizes."""

from __future__ import annotations

import dataclasses
import fnmatch
import statistics
from typing import Any

import torch

from benchmarks.cases.contests import OURS, Contest, of_8_bits
from benchmarks.cases.experts import HAS_TRANSFORMERS, of_experts
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Table, number, progress
from benchmarks.harness.runner import Bench, Budget
from benchmarks.harness.timing import in_turn
from benchmarks.kinds import Run

CONTESTS = {"fp8": of_8_bits, "experts": of_experts}
"""By the kind of record."""
METHOD = (
    "Times of others over ours: above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. Ours has the epilogue applied, scaled_mm and grouped_mm have not; eager is these and PyTorch's "
    "operators behind them. Each result of ours was within its bound of float64."
)


def main(run: Run) -> int:
    """Measure; 1 if a result of ours is wrong.

    Raises:
        ValueError: there is no GPU.
    """
    name = run.options.contest
    if run.device.type != "cuda":
        raise ValueError("--contest: needs a GPU")
    bench, budget = run.bench(), Budget(run.budget)
    record = run.record(name, METHOD, dataclasses.asdict(bench.effort))
    seed, count = run.options.random or 0, run.options.count
    cases, wrong, told = {}, {}, progress(count)
    for contest in CONTESTS[name](seed, count, run.device):
        patterns = run.options.cases
        if patterns and not any(fnmatch.fnmatch(contest.name, pattern) for pattern in patterns):
            continue
        if budget.why_spent():
            budget.left_out[contest.name] = budget.why_spent()
            continue
        part = contest.part_of_bound()
        cases[contest.name] = measure(contest, bench) | {"part_of_bound": round(part, 4)}
        if part > 1:
            wrong[contest.name] = part
        record.figures = {"seed": seed, "cases": cases, "geomeans": geomeans(cases), "wrong": wrong}
        record.write()
        told(contest.name)
    remarks = [
        f"{key}: geomean {mean:.3f}, worst {worst:.3f}" for key, (mean, worst) in geomeans(cases).items()
    ]
    remarks += [f"{case}: {why}" for case, why in budget.left_out.items()]
    if name == "experts" and not HAS_TRANSFORMERS:
        remarks.append("transformers is missing: none of its layers was run")
    record.finish([table(cases)], remarks + [f"WRONG: {case}: {part}" for case, part in wrong.items()])
    return bool(wrong)


def measure(contest: Contest, bench: Bench) -> dict[str, Any]:
    """Microseconds of each, and the ratios."""
    runs = list(contest.runs.values())
    host_us = max(bench.timer.host_us(each) for each in runs)
    samples = in_turn(bench.timer, runs, bench.effort, host_us)
    medians = (round(1e3 * statistics.median(each), 2) for each in samples)
    us = dict(zip(contest.runs, medians, strict=True))
    torch.cuda.empty_cache()
    ratios = {key: round(us[other] / us[OURS], 4) for key, other in contest.ratios.items()}
    errors = contest.errors()
    return {"us": us} | ratios | ({"relative_errors": errors} if errors else {})


def geomeans(cases: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """By key: the geometric mean, and the least ratio."""
    by_key: dict[str, list[float]] = {}
    for case in cases.values():
        for key, value in case.items():
            if key.startswith("vs_"):
                by_key.setdefault(key, []).append(value)
    return {key: (round(geomean(values) or 0.0, 4), min(values)) for key, values in by_key.items()}


def table(cases: dict[str, Any]) -> Table:
    """A line for each case."""
    keys = list(dict.fromkeys(key for case in cases.values() for key in case if key.startswith("vs_")))
    rows = [
        [name, f"{case['us'][OURS]:.1f}", *(number(case.get(key)) for key in keys)]
        for name, case in cases.items()
    ]
    return Table("Times of others over ours", ("case", "us", *keys), rows)
