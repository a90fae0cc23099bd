"""The sweep over every plan of the fused kernel: tile x raster order x swizzle, against the bare product.

It shows what the dispatcher's choice costs against the best plan there is, which is what its cost model is
made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from epigemm.bench.accuracy import Reference
from epigemm.bench.cases import Case, Data, make_data
from epigemm.bench.formulas import NativeOperands
from epigemm.bench.peers import native_plan
from epigemm.bench.records import Accuracy, Timing
from epigemm.bench.report import Console, plain
from epigemm.bench.runner import matmul_precision
from epigemm.bench.timing import Effort, make_timer

RASTERS = ("along_m", "along_n")
SWIZZLES = (1, 2, 4, 8)
_SHOWN = 12


@dataclass(frozen=True)
class PlanTiming:
    """One plan: what it is, its time, and how many times faster than the bare product it is."""

    tile: str
    cluster: str
    schedule: str
    raster: str
    swizzle: int
    dispatched: bool
    timing: Timing
    times_faster_than_mm: float
    accuracy: Accuracy


@dataclass(frozen=True)
class PlanSweep:
    """All plans of one case, right ones first, fastest first.

    ``why_not`` says why there are none; ``refused`` names the plans that could not be launched, with the error.
    """

    case: str
    shape: tuple[int, ...]
    why_not: str
    mm: Timing | None
    dispatched: Timing | None
    plans: list[PlanTiming]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a plan gave a wrong result or none."""
        return bool(self.refused) or any(not plan.accuracy.ok for plan in self.plans)


@dataclass(frozen=True)
class _Candidate:
    tile: dict[str, Any]
    raster: int
    swizzle: int

    def numbers(self) -> list[int]:
        return [int(self.tile["tile_index"]), self.raster, self.swizzle]


def _candidates(plan: dict[str, Any]) -> list[_Candidate]:
    tiles = {int(candidate["tile_index"]): candidate for candidate in plan["candidates"]}
    return [
        _Candidate(tiles[index], raster, swizzle)
        for index, raster, swizzle in product(sorted(tiles), range(len(RASTERS)), SWIZZLES)
    ]


def _is_dispatched(plan: dict[str, Any], candidate: _Candidate) -> bool:
    chosen = (plan["tile_index"], plan["raster"], plan["swizzle"])
    return chosen == (candidate.tile["tile_index"], RASTERS[candidate.raster], candidate.swizzle)


def _runner(
    case: Case, data: Data, native: NativeOperands, out: Tensor, plan: list[int]
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        launched = torch.ops.epigemm._fused_linear_out(
            case.problem.formula.epilogue,
            data.x,
            data.weight,
            native.bias,
            native.operands,
            native.scalars,
            case.setting.arithmetic,
            plan,
            out,
        )
        if not launched:
            raise RuntimeError(f"plan {plan}: the fused kernel does not cover this problem")
        return out

    return run


def sweep(case: Case, device: torch.device, effort: Effort, seed: int = 0) -> PlanSweep:
    """Time and check every plan of one linear case in turn."""
    shape = (case.shape.m, case.shape.n, case.shape.k or 0)
    with torch.no_grad(), matmul_precision(case.setting):
        data = make_data(case, device, seed)
        out = torch.empty(case.shape.m, case.shape.n, dtype=case.setting.dtype, device=device)
        plan = native_plan(case, data, out)
        if device.type != "cuda" or not plan.get("fused"):
            why = str(plan.get("why_not", "")) or "the fused kernels need a GPU"
            return PlanSweep(case.name, shape, why, None, None, [])
        native = case.problem.formula.native(data.x, data.parameters)
        assert data.weight is not None
        transposed = data.weight.t()
        reference = Reference(case, data, seed)
        candidates, accuracies, refused = _check_all(
            reference, _candidates(plan), lambda numbers: _runner(case, data, native, out, numbers), out
        )
        runs = [_runner(case, data, native, out, c.numbers()) for c in candidates]
        timer = make_timer(device)
        others = [lambda: torch.mm(data.x, transposed, out=out), _runner(case, data, native, out, [])]
        everything = [*others, *runs]
        host_us = max(timer.warm_up(run) for run in everything)
        mm, dispatched, *times = (Timing.of(s) for s in timer.in_turn(everything, effort, host_us))
    plans = [
        PlanTiming(
            tile=str(c.tile["tile"]),
            cluster=str(c.tile["cluster"]),
            schedule=str(c.tile["schedule"]),
            raster=RASTERS[c.raster],
            swizzle=c.swizzle,
            dispatched=_is_dispatched(plan, c),
            timing=timing,
            times_faster_than_mm=mm.median_ms / timing.median_ms,
            accuracy=accuracy,
        )
        for c, timing, accuracy in zip(candidates, times, accuracies, strict=True)
    ]
    plans.sort(key=lambda p: (not p.accuracy.ok, p.timing.median_ms))
    return PlanSweep(case.name, shape, "", mm, dispatched, plans, refused)


def _check_all(
    reference: Reference,
    candidates: Sequence[_Candidate],
    bind: Callable[[list[int]], Callable[[], Tensor]],
    out: Tensor,
) -> tuple[list[_Candidate], list[Accuracy], dict[str, str]]:
    """Hold every plan's result against float64; those that cannot be launched come back apart."""
    launched: list[_Candidate] = []
    accuracies: list[Accuracy] = []
    refused: dict[str, str] = {}
    for candidate in candidates:
        out.fill_(float("nan"))
        try:
            accuracy = reference.compare(bind(candidate.numbers())(), intermediate_roundings=0)
        except RuntimeError as error:
            refused[str(candidate.numbers())] = str(error).splitlines()[0]
            continue
        launched.append(candidate)
        accuracies.append(accuracy)
    return launched, accuracies, refused


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
    for numbers, error in result.refused.items():
        console.line(plain(f"{result.case}: plan {numbers} was refused: {error}"))
    if result.mm is None or result.dispatched is None or not result.plans:
        console.line(plain(f"{result.case}: no plans: {result.why_not}"))
        return
    best = result.plans[0].timing.median_ms
    columns = [
        "tile",
        "cluster",
        "schedule",
        "raster",
        "swizzle",
        "ms",
        "IQR",
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
            f"{plan.timing.median_ms:.4g}",
            f"{100 * plan.timing.spread:.1f}%",
            f"{plan.times_faster_than_mm:.3f}x",
            f"{best / plan.timing.median_ms:.3f}",
            f"ok, {plan.accuracy.fraction_of_bound:.2f}" if plan.accuracy.ok else "WRONG",
        ]
        for plan in _worth_showing(result.plans, everything)
    ]
    console.line()
    console.table(
        f"{result.case}: {len(result.plans)} plans, torch.mm {result.mm.median_ms:.4g} ms", columns, rows
    )


def summarise(console: Console, sweeps: Iterable[PlanSweep]) -> None:
    """One line per case: the best plan and what dispatch got."""
    rows = []
    for result in sweeps:
        if result.mm is None or result.dispatched is None or not result.plans:
            continue
        best = result.plans[0]
        name = f"{best.tile} {best.cluster} {best.schedule} {best.raster} {best.swizzle}"
        chosen = result.dispatched.median_ms
        rows.append(
            [
                result.case,
                name,
                f"{best.times_faster_than_mm:.3f}x",
                f"{result.mm.median_ms / chosen:.3f}x",
                f"{best.timing.median_ms / chosen:.3f}",
                "WRONG" if result.failed else "ok",
            ]
        )
    console.line()
    columns = ["case", "best plan", "best vs torch.mm", "dispatch vs torch.mm", "dispatch of best", "check"]
    console.table("Plans: summary", columns, rows)
