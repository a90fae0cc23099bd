"""The sweep over every plan of the fused kernels: tile x raster order x swizzle, against the bare product.

It shows what the dispatcher's choice costs against the best plan there is, which is what its cost model is
made from. fp32 is swept on fp16 pieces, also where dispatch would not take them: a time is that of a whole call
with the weight's pieces at hand, and the part of it that splits x is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy import Reference
from benchmarks.cases import Case, Data, make_data
from benchmarks.pieces import why_no_kernels
from benchmarks.plan_kernels import RASTERS, Family, families, plan_numbers
from benchmarks.records import Accuracy, PlanSweep, PlanTiming, Timing
from benchmarks.report import Console, plain
from benchmarks.runner import matmul_precision
from benchmarks.tables import Table
from epigemm.timing import Effort, Run, make_timer

_SHOWN = 12


@dataclass(frozen=True)
class _Plan:
    tile: dict[str, Any]
    numbers: list[int]

    def is_dispatched(self, answer: dict[str, Any]) -> bool:
        return "plan" in answer and plan_numbers(answer) == self.numbers


def sweep(case: Case, device: torch.device, effort: Effort, seed: int = 0) -> list[PlanSweep]:
    """Time and check every plan of one linear case in turn, one record for each family of kernels."""
    shape = (case.shape.m, case.shape.n, case.shape.k or 0)
    why_not = why_no_kernels(device)
    if why_not:
        return [PlanSweep(case.name, shape, case.setting.pieces or case.setting.dtype_name, why_not)]
    with torch.no_grad(), matmul_precision(case.setting):
        data = make_data(case, device, seed)
        out = torch.empty(case.shape.m, case.shape.n, dtype=case.setting.dtype, device=device)
        found = []
        try:
            swept = families(case, data, out)
        except RuntimeError as error:  # one case that fails must not take the others with it
            failure = {"all": str(error).splitlines()[0]}
            return [PlanSweep(case.name, shape, case.setting.pieces, "", refused=failure)]
        for family in swept:
            result = PlanSweep(case.name, shape, family.arithmetic, str(family.plan.get("why_not", "")))
            right = _check_all(case, data, out, family, seed, result.refused)
            if right:
                _time_all(data, out, family, right, effort, result)
            found.append(result)
    return found


def _check_all(
    case: Case, data: Data, out: Tensor, family: Family, seed: int, refused: dict[str, str]
) -> list[tuple[_Plan, Accuracy]]:
    """Hold every plan's result against float64; those that cannot be launched are told apart in ``refused``."""
    plans = [_Plan(tile, numbers) for tile, numbers in family.plans()]
    reference = Reference(case, data, seed) if plans else None
    launched: list[tuple[_Plan, Accuracy]] = []
    for plan in plans:
        assert reference is not None
        out.fill_(float("nan"))
        try:
            accuracy = reference.compare(family.bind(plan.numbers)(), intermediate_roundings=0)
        except RuntimeError as error:
            refused[str(plan.numbers)] = str(error).splitlines()[0]
            continue
        launched.append((plan, accuracy))
    return launched


def _time_all(
    data: Data,
    out: Tensor,
    family: Family,
    checked: Sequence[tuple[_Plan, Accuracy]],
    effort: Effort,
    result: PlanSweep,
) -> None:
    """Everything in turn: the bare product, dispatch's own choice, the split of x, and every plan."""
    assert data.weight is not None
    transposed = data.weight.t()
    others: dict[str, Run] = {"mm": lambda: torch.mm(data.x, transposed, out=out)}
    if family.plan.get("fused"):
        others["dispatched"] = family.bind([])
    if family.split_x is not None:
        others["split_x"] = family.split_x
    runs = [*others.values(), *(family.bind(plan.numbers) for plan, _ in checked)]
    timer = make_timer(data.x.device)
    host_us = max(timer.warm_up(run) for run in runs)
    timings = [Timing.of(samples) for samples in timer.in_turn(runs, effort, host_us)]
    measured = dict(zip(others, timings, strict=False))
    result.mm, result.dispatched, result.split_x = (
        measured["mm"],
        measured.get("dispatched"),
        measured.get("split_x"),
    )
    for (plan, accuracy), timing in zip(checked, timings[len(others) :], strict=True):
        _, tile, raster, swizzle, splits = plan.numbers
        result.plans.append(
            PlanTiming(
                family=str(plan.tile["family"]),
                tile_index=tile,
                tile=str(plan.tile["tile"]),
                cluster=str(plan.tile["cluster"]),
                schedule=str(plan.tile["schedule"]),
                raster=RASTERS[raster],
                swizzle=swizzle,
                splits=splits,
                dispatched=plan.is_dispatched(family.plan),
                timing=timing,
                times_faster_than_mm=measured["mm"].median_ms / timing.median_ms,
                accuracy=accuracy,
                predicted_us=family.predicted_us(plan.numbers),
            )
        )
    result.plans.sort(key=lambda p: (not p.accuracy.ok, p.timing.median_ms))


def _worth_showing(plans: Sequence[PlanTiming], everything: bool) -> list[PlanTiming]:
    """The fastest, the best of each tile, the dispatcher's, and whatever is wrong."""
    if everything:
        return list(plans)
    best: dict[tuple[str, str, str], PlanTiming] = {}
    for plan in plans:
        best.setdefault((plan.tile, plan.cluster, plan.schedule), plan)
    leaders = {id(plan) for plan in best.values()}
    return [
        plan
        for index, plan in enumerate(plans)
        if index < _SHOWN or plan.dispatched or not plan.accuracy.ok or id(plan) in leaders
    ]


def show(console: Console, result: PlanSweep, *, everything: bool = False) -> None:
    """A table of the plans; ``everything`` shows all of them instead of the telling ones."""
    name = f"{result.case}, {result.arithmetic}"
    for numbers, error in result.refused.items():
        console.line(plain(f"{name}: plan {numbers} was refused: {error}"))
    if result.mm is None or not result.plans:
        console.line(plain(f"{name}: no plans: {result.why_not}"))
        return
    best = result.plans[0].timing.median_ms
    columns = [
        "tile",
        "cluster",
        "schedule",
        "raster",
        "swizzle",
        "splits",
        "ms",
        "IQR",
        "predicted",
        "vs torch.mm",
        "of best",
        "check",
    ]
    rows = [
        [
            plan.tile + (" <- dispatched" if plan.dispatched else ""),
            plan.cluster,
            plan.schedule,
            plan.raster,
            str(plan.swizzle),
            str(plan.splits),
            f"{plan.timing.median_ms:.4g}",
            f"{100 * plan.timing.spread:.1f}%",
            "" if plan.predicted_us is None else f"{plan.predicted_us / 1e3:.4g}",
            f"{plan.times_faster_than_mm:.3f}x",
            f"{best / plan.timing.median_ms:.3f}",
            f"ok, {plan.accuracy.fraction_of_bound:.2f}" if plan.accuracy.ok else "WRONG",
        ]
        for plan in _worth_showing(result.plans, everything)
    ]
    console.line()
    console.table(
        plain(
            f"{name}: {len(result.plans)} plans, torch.mm {result.mm.median_ms:.4g} ms"
            + (f", x's split {result.split_x.median_ms:.4g} ms" if result.split_x else "")
            + (f"; dispatch takes none: {result.why_not}" if result.why_not else "")
        ),
        columns,
        rows,
    )


def summarise(console: Console, sweeps: Sequence[PlanSweep], table: Table | None) -> None:
    """One line per sweep: the best plan and what dispatch got; then what is wrong."""
    if table is not None:
        console.line()
        console.table(table.title, table.columns, table.rows)
    for result in sweeps:
        if result.failed:
            console.line(plain(f"WRONG: {result.case}, {result.arithmetic}"))
