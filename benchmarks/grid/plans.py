"""Every plan of the fused kernels at every point of the grid: the measurements that a cost model is fitted to.

One row for each plan and point, in microseconds, and for each point what the bare product and the peers take.
Rows and columns of every plan's result are checked. Each tile runs in the order that dispatch would give it, or in
every raster order and swizzle.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Data
from benchmarks.grid.runner import Inputs, why_no_room
from benchmarks.grid.sampling import SampledReference
from benchmarks.peers import Peer
from benchmarks.pieces import why_no_kernels
from benchmarks.plan_kernels import Family, families
from benchmarks.records import OWN, Accuracy, Timing
from benchmarks.runner import describe_error, matmul_precision
from epigemm.timing import Effort, Run, Timer, make_timer

EFFORT = Effort(rounds=5, min_ms=0.5, max_rounds=15, pause_s=None)


@dataclass(frozen=True)
class PlanTime:
    """One plan at one point.

    Attributes:
        plan: what the native operators take; empty for what is no plan of ours.
        name: the tile, or the alternative.
        us, q1_us, q3_us: median and quartiles.
        predicted_us: what the cost model expects, where it considers the plan.
        ok: False where the result left its bound.
        fraction_of_bound: the largest error over its bound, where it was checked.
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
    """All plans of one family of kernels at one point, fastest first, and beside them the alternatives.

    Attributes:
        arithmetic: the family: a 16-bit dtype, "tf32", "split" or "scaled".
        why_not: why dispatch takes none of them ("" where it does).
        refused: plan -> why it could not be launched.
        error: why nothing was measured ("" otherwise).
    """

    problem: str
    m: int
    n: int
    k: int
    dtype: str
    precision: str
    arithmetic: str
    why_not: str = ""
    plans: list[PlanTime] = field(default_factory=list)
    others: list[PlanTime] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether nothing could be measured or a plan gave a wrong result."""
        return bool(self.error) or any(not plan.ok for plan in self.plans)


@dataclass
class PlanGrid:
    """Sweeps the plans over the points of a grid.

    Attributes:
        peers: measured at each point beside the plans.
        every_order: each tile in every raster order and swizzle, not in dispatch's alone.
        checked: hold every plan's result against float64, which takes longer than timing it.
        left_out: case -> why it was not measured.
    """

    device: torch.device
    peers: Sequence[Peer]
    effort: Effort = EFFORT
    time_budget_s: float | None = None
    seed: int = 0
    every_order: bool = False
    checked: bool = True
    progress: Callable[[str, bool], None] = lambda text, finished: None
    left_out: dict[str, str] = field(default_factory=dict)

    def sweep(self, cases: Sequence[Case]) -> Iterator[PlanPoint]:
        """One record for each case and family of kernels."""
        started, cost = time.monotonic(), 0.0
        reasons = {case.name: why_no_room(case, self.device) for case in cases}
        self.left_out |= {name: why for name, why in reasons.items() if why}
        cases = [case for case in cases if not reasons[case.name]]
        inputs, timer = Inputs(self.device, cases, self.seed), make_timer(self.device)
        for case in cases:
            began = time.monotonic()
            if self.time_budget_s is not None and began - started + 2 * cost > self.time_budget_s:
                self.left_out[case.name] = f"left out: the time budget of {self.time_budget_s:g} s was spent"
                continue
            with torch.no_grad(), matmul_precision(case.setting):
                yield from self._points(case, inputs, timer)
            cost = time.monotonic() - began
            self.progress(case.name, True)

    def _points(self, case: Case, inputs: Inputs, timer: Timer) -> Iterator[PlanPoint]:
        if why_not := why_no_kernels(self.device):
            yield _empty(case, case.setting.pieces or case.setting.dtype_name, why_not)
            return
        try:
            data, out = inputs.of(case)
            reference = SampledReference(case, data, self.seed) if self.checked else None
            swept = families(case, data, out)
        except Exception as error:  # one point that fails must not take the others with it
            yield dataclasses.replace(_empty(case, "", ""), error=describe_error(error))
            return
        for family in swept:
            point = _empty(case, family.arithmetic, str(family.plan.get("why_not", "")))
            self._measure(case, data, out, family, reference, timer, point)
            yield point

    def _measure(
        self,
        case: Case,
        data: Data,
        out: Tensor,
        family: Family,
        reference: SampledReference | None,
        timer: Timer,
        point: PlanPoint,
    ) -> None:
        others = [
            peer.prepare(case, data, out)
            for peer in self.peers
            if peer.name not in OWN and not peer.applies(case, self.device)
        ]
        checked = _check(family, self.every_order, out, reference, point.refused)
        runs: list[Run] = [*(other.run for other in others), *(run for _, _, run, _ in checked)]
        if not runs:
            return
        host_us = max(timer.warm_up(run) for run in runs[: len(others) + 1])
        timings = [Timing.of(samples) for samples in timer.in_turn(runs, self.effort, host_us)]
        point.others = [
            _plan_time([], other.name, timing) for other, timing in zip(others, timings, strict=False)
        ]
        for (tile, numbers, _, accuracy), timing in zip(checked, timings[len(others) :], strict=True):
            name = " ".join(str(tile[key]) for key in ("tile", "cluster", "schedule") if tile.get(key))
            point.plans.append(
                dataclasses.replace(
                    _plan_time(numbers, name, timing),
                    predicted_us=family.predicted_us(numbers),
                    ok=accuracy is None or accuracy.ok,
                    fraction_of_bound=None if accuracy is None else accuracy.fraction_of_bound,
                )
            )
        point.plans.sort(key=lambda plan: plan.us)
        for other in others:
            other.close()


_Checked = tuple[dict[str, Any], list[int], Run, Accuracy | None]


def _check(
    family: Family,
    every_order: bool,
    out: Tensor,
    reference: SampledReference | None,
    refused: dict[str, str],
) -> list[_Checked]:
    """Hold every plan's result against float64; those that cannot be launched are told apart in ``refused``.

    Without a reference they are launched, and that is all.
    """
    launched: list[_Checked] = []
    for tile, numbers in family.plans(every_order=every_order):
        run = family.bind(numbers)
        accuracy = None
        try:
            if reference is None:
                run()
            else:
                out.fill_(float("nan"))
                accuracy = reference.compare(run(), intermediate_roundings=0)
        except RuntimeError as error:
            refused[str(numbers)] = describe_error(error)
            continue
        launched.append((tile, numbers, run, accuracy))
    return launched


def _empty(case: Case, arithmetic: str, why_not: str) -> PlanPoint:
    shape, setting = case.shape, case.setting
    precision = setting.precision if setting.dtype_name == "fp32" else ""
    return PlanPoint(
        case.problem.name,
        shape.m,
        shape.n,
        shape.k or 0,
        setting.dtype_name,
        precision,
        arithmetic,
        why_not,
    )


def _plan_time(numbers: list[int], name: str, timing: Timing) -> PlanTime:
    median, q1, q3 = (1e3 * ms for ms in (timing.median_ms, timing.q1_ms, timing.q3_ms))
    return PlanTime(numbers, name, median, q1, q3, timing.samples)
