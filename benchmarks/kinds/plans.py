"""``--plans``: every plan that the planner considers, at given shapes: what the cost models are fitted to.

One row for each plan and point, in microseconds, and for each point what the bare product and the fallback take. Each
plan runs in the order of tiles that the planner gives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, FALLBACK, our_call
from benchmarks.cases import Case, Data, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.harness import report
from benchmarks.harness.records import EAGER, MM, Accuracy, Timing
from benchmarks.harness.report import SCHEMA, Table, finite
from benchmarks.harness.runner import Budget, Inputs, describe_error, matmul_precision
from benchmarks.harness.sampling import SampledReference
from epigemm import candidates, execution
from epigemm.calls import LinearCall
from epigemm.recording import record
from epigemm.timing import Effort, Run, make_timer

EFFORT = Effort(rounds=5, min_ms=0.0, max_rounds=5, pause_s=None)
_WRITE_EVERY_S = 10.0


@dataclass(frozen=True)
class PlanTime:
    """One plan at one point.

    Attributes:
        plan: family, tile, raster, swizzle, splits; empty for what is no plan of ours.
        name: the tile, or the alternative.
        us, q1_us, q3_us: median and quartiles.
        predicted_us: what the cost model expects.
        ok: False where the result left its bound.
    """

    plan: list[int]
    name: str
    us: float
    q1_us: float
    q3_us: float
    samples: int
    predicted_us: float | None = None
    ok: bool = True
    fraction_of_bound: float | None = None


@dataclass
class PlanPoint:
    """All plans of one arithmetic at one point, fastest first, and beside them the alternatives.

    Attributes:
        arithmetic: what they multiply in.
        left_out: why plans could not be linked or launched.
        error: why nothing was measured ("" otherwise).
    """

    problem: str
    m: int
    n: int
    k: int
    dtype: str
    precision: str
    arithmetic: str = ""
    plans: list[PlanTime] = field(default_factory=list)
    others: list[PlanTime] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether nothing could be measured or a plan gave a wrong result."""
        return bool(self.error) or any(not plan.ok for plan in self.plans)


def select(patterns: Sequence[str], shapes: Sequence[Shape], settings: Sequence[Setting]) -> list[Case]:
    """Linear problems in evaluation mode at every shape; without patterns ``linear/bias_relu``.

    Raises:
        ValueError: nothing is left, or a shape has no K.
    """
    if not shapes or any(shape.k is None for shape in shapes):
        raise ValueError("--plans: goes with --random SEED, or with --sizes MxNxK")
    wanted = patterns or ("linear/bias_relu",)
    chosen = [p for p in problems() if p.kind == "linear" and not p.training and p.name in wanted]
    if not chosen:
        raise ValueError(
            f"--cases: with --plans linear problems by their full names, got {', '.join(wanted)}"
        )
    return [Case(problem, shape, setting) for setting in settings for problem in chosen for shape in shapes]


@dataclass
class PlanSweep:
    """Times plans; `checked`: hold every plan's result against float64, which takes longer than timing it."""

    device: torch.device
    effort: Effort = EFFORT
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    checked: bool = True
    progress: Callable[[str, bool], None] = lambda text, finished: None

    def __post_init__(self) -> None:
        """Allocate the timer's flush buffer once."""
        self._timer = make_timer(self.device)

    def sweep(self, cases: Sequence[Case]) -> Iterator[PlanPoint]:
        """One record for each case and arithmetic."""
        cases = self.budget.with_room(cases, self.device)
        inputs = Inputs(self.device, cases, self.seed)
        for case in self.budget.spend(cases):
            try:
                with torch.no_grad(), matmul_precision(case.setting):
                    yield from self._points(case, *inputs.of(case))
            except Exception as error:  # one point that fails must not take the others with it
                point = _empty(case)
                point.error = describe_error(error)
                yield point
            self.progress(case.name, True)

    def _points(self, case: Case, data: Data, out: Tensor) -> Iterator[PlanPoint]:
        function, given = our_call(case, data)
        _, call = record(function, *given)[1].taken_apart()
        assert isinstance(call, LinearCall)
        answers = {each.arithmetic: each.plan for each in execution.considered(call)}
        reference = SampledReference(case, data, self.seed) if self.checked else None
        for family in candidates.families(call, within=float("inf")):
            point = _empty(case, family.kind.arithmetic)
            point.left_out += family.left_out
            predicted = {
                tuple(answer["plan"]): answer for answer in answers[point.arithmetic].get("candidates", [])
            }
            runs: dict[str, Run] = {FALLBACK: family.fallback.run}
            runs |= {name: BASELINES[name].prepare(case, data, out).run for name in (MM, EAGER)}
            chosen = [each for each in family.candidates if each.plan in predicted]
            with family.setting():
                self._measure(point, runs, chosen, predicted, reference)
            yield point

    def _measure(
        self,
        point: PlanPoint,
        others: Mapping[str, Run],
        chosen: Sequence[candidates.Candidate],
        predicted: Mapping[tuple[int, ...], Mapping[str, Any]],
        reference: SampledReference | None,
    ) -> None:
        launched: list[tuple[candidates.Candidate, Accuracy | None]] = []
        for each in chosen:
            try:
                result = each.run().fill_(float("nan"))
                result = each.run()
            except RuntimeError as error:
                point.left_out.append(f"{each.plan}: {describe_error(error)}")
                continue
            cut = result[:, : point.n]
            launched.append((each, reference.compare(cut, 0) if reference else None))
        runs = [*others.values(), *(each.run for each, _ in launched)]
        host_us = max(self._timer.warm_up(run) for run in runs[: len(others) + 1])
        timings = [Timing.of(samples) for samples in self._timer.in_turn(runs, self.effort, host_us)]
        point.others = [_plan_time((), name, timing) for name, timing in zip(others, timings, strict=False)]
        for (each, accuracy), timing in zip(launched, timings[len(others) :], strict=True):
            answer = predicted[each.plan]
            name = " ".join(str(answer[key]) for key in ("tile", "cluster", "schedule") if answer.get(key))
            ok, fraction = (accuracy.ok, accuracy.fraction_of_bound) if accuracy else (True, None)
            found = (float(answer["predicted_us"]), ok, fraction)
            point.plans.append(_plan_time(each.plan, name, timing, *found))
        point.plans.sort(key=lambda plan: plan.us)


def _empty(case: Case, arithmetic: str = "") -> PlanPoint:
    shape, setting = case.shape, case.setting
    precision = setting.precision if setting.dtype_name == "fp32" else ""
    sizes = (shape.m, shape.n, shape.k or 0)
    return PlanPoint(case.problem.name, *sizes, setting.dtype_name, precision, arithmetic)


def _plan_time(plan: Sequence[int], name: str, timing: Timing, *more: Any) -> PlanTime:
    median, q1, q3 = (1e3 * ms for ms in (timing.median_ms, timing.q1_ms, timing.q3_ms))
    return PlanTime(list(plan), name, median, q1, q3, timing.samples, *more)


def measure(
    sweep: PlanSweep, cases: Sequence[Case], about: Mapping[str, Any], folder: Path | None
) -> list[PlanPoint]:
    """Measure every plan at every point; ``folder`` takes ``plans.json`` as far as it has come."""
    found: list[PlanPoint] = []
    written, wait_s = time.monotonic(), _WRITE_EVERY_S

    def keep(*, complete: bool) -> None:
        head = {"schema": SCHEMA, "kind": "plans", "complete": complete, "environment": about}
        head |= {"effort": asdict(sweep.effort), "left_out": sweep.budget.left_out}
        data = finite(head | {"plan_points": [asdict(point) for point in found]})
        if folder:
            report.write_json(data, folder / "plans.json")

    for point in sweep.sweep(cases):
        found.append(point)
        if (began := time.monotonic()) - written > wait_s:
            keep(complete=False)
            # Thousands of points take seconds to write, a tenth of the time at most.
            written = time.monotonic()
            wait_s = max(_WRITE_EVERY_S, 9 * (written - began))
    keep(complete=True)
    return found


def table(points: Sequence[PlanPoint]) -> Table:
    """One line for each point: the fastest plan beside what was measured with it."""
    names = list(dict.fromkeys(other.name for point in points for other in point.others))
    rows = []
    for point in points:
        what = f"{point.problem} {point.m}x{point.n}x{point.k} {point.arithmetic or point.dtype}"
        best = next((plan for plan in point.plans if plan.ok), None)
        us = {other.name: f"{other.us:.4g}" for other in point.others}
        mine = [f"{best.us:.4g}", f"{best.name} {best.plan}"] if best else ["", point.error or "no plan"]
        wrong = sum(not plan.ok for plan in point.plans)
        rows.append([what, *mine, *(us.get(name, "") for name in names), str(len(point.plans)), str(wrong)])
    columns = ("point", "us", "best plan", *(f"{name} us" for name in names), "plans", "wrong")
    return Table("Plans", columns, rows)
