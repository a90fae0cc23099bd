"""``--plans``: every plan that the planner considers, at given shapes: what the cost models are fitted to.

A point for each shape and arithmetic, with its plans, fastest first, each in the order of tiles that the
planner gives it, and the fallback. No result is checked: the tests run every kernel. `tools/judge_costs.py` says how
right the models are there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.baselines import our_call
from benchmarks.cases import Case, make_data
from benchmarks.cases.problems import problems
from benchmarks.harness.records import Timing
from benchmarks.harness.report import Table, progress, write_json
from benchmarks.harness.runner import Bench, Budget, describe_error, matmul_precision
from benchmarks.harness.timing import Effort, in_turn
from benchmarks.kinds import Run
from epigemm.arguments.calls import LinearCall
from epigemm.calls.forecast import consider
from epigemm.explain.log import logged
from epigemm.tuner import tuner

METHOD = "Medians of calls in turn, the L2 cache flushed before each call. No result is checked."
_EFFORT = Effort(rounds=5, min_ms=0.0, max_rounds=5)


def main(run: Run) -> int:
    """Measure; ``plans.json``. 1 if a point has none.

    Raises:
        ValueError: not on a GPU, no shapes, or a case that is no linear problem by its full name.
    """
    shapes, wanted = run.shapes(), run.options.cases or ["linear/bias_relu"]
    chosen = [p for p in problems() if p.kind == "linear" and not p.training and p.name in wanted]
    if run.device.type != "cuda":
        raise ValueError("--plans: needs a GPU")
    if not shapes or any(shape.k is None for shape in shapes):
        raise ValueError("--plans: goes with --random SEED, or with --sizes MxNxK")
    if not chosen:
        raise ValueError(f"--cases: --plans takes linear problems by their full names, got {wanted}")
    cases = [Case(p, shape, setting) for setting in run.settings() for p in chosen for shape in shapes]
    bench, budget, told = run.bench(_EFFORT), Budget(run.budget), progress(len(cases))
    points = []
    for case in budget.spend(cases, bench.device):
        points += sweep(bench, case)
        told(case.name)
    failed = [f"{point['case']}: {point['error']}" for point in points if point["error"]]
    made = run.record("plans", METHOD, dataclasses.asdict(_EFFORT))
    counts = Counter(point["arithmetic"] for point in points if not point["error"])
    made.figures = {"cases": counts, "left_out": budget.left_out, "failed": failed}
    if made.folder:
        write_json({"plan_points": points}, made.folder / "plans.json")
    rows = [[arithmetic, str(count)] for arithmetic, count in counts.items()]
    made.finish([Table("Points", ("arithmetic", "points"), rows)], failed)
    return bool(failed)


def sweep(bench: Bench, case: Case) -> list[dict[str, Any]]:
    """A point for each arithmetic of a case."""
    try:
        with torch.no_grad(), matmul_precision(case.setting):
            return list(_points(bench, case))
    except Exception as error:  # one point that fails must not take the others with it
        return [{"case": case.name, "plans": [], "error": describe_error(error)}]


def _points(bench: Bench, case: Case) -> Iterator[dict[str, Any]]:
    data = make_data(case, bench.device, bench.seed)
    data.refill(signed=True, seed=bench.seed + 1)
    function, given, _ = our_call(case, data)
    call = logged(function, *given, is_single=True)[1].calls[-1].call
    assert isinstance(call, LinearCall)
    answers = {each.arithmetic: each.plan for each in consider(call).found.tried}
    for family in tuner.families(call, within=float("inf")):
        arithmetic, left_out = family.arithmetic, list(family.left_out)
        predicted = {tuple(each["plan"]): each for each in answers[arithmetic].get("candidates", [])}
        chosen = []
        with family.setting():
            for each in family.candidates:
                if each.plan in predicted:
                    try:
                        each.run()
                        chosen.append(each)
                    except RuntimeError as error:
                        left_out.append(f"{each.plan}: {describe_error(error)}")
            runs = [family.fallback.run, *(each.run for each in chosen)]
            host_us = max(bench.timer.host_us(run) for run in runs[:2])
            times = [Timing.of(samples) for samples in in_turn(bench.timer, runs, bench.effort, host_us)]
        plans = [
            {"plan": each.plan, "name": _name(predicted[each.plan]), "us": 1e3 * time.median_ms}
            | {"predicted_us": predicted[each.plan]["predicted_us"]}
            for each, time in sorted(zip(chosen, times[1:], strict=True), key=lambda pair: pair[1].median_ms)
        ]
        yield {
            "case": case.name,
            "shape": [case.shape.m, case.shape.n, case.shape.k],
            "arithmetic": arithmetic,
            "plans": plans,
            "fallback_us": 1e3 * times[0].median_ms,
            "left_out": left_out,
            "error": "",
        }


def _name(answer: dict[str, Any]) -> str:
    return " ".join(str(answer[key]) for key in ("tile", "cluster", "schedule") if answer.get(key))
