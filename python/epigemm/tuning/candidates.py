"""All candidates for a call: every plan of the fused kernels that cover it, and the fallback, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls.considered import consider
from epigemm.calls.deeds import Forced
from epigemm.linking import loading
from epigemm.planning import dry_runs, plans
from epigemm.planning.dry_runs import Tried

TORCH: tuple[int, ...] = ()
"""In place of a plan: the fallback, torch's GEMM and one elementwise kernel where that does not do everything."""

SWAP_AB = "sm90_swap_ab"
"""The family of kernels with one order of the tiles only."""
_RASTERS = ("along_m", "along_n")
_HOPELESS = 1.7  # times the best predicted time


def on_random_x(call: LinearCall) -> LinearCall:
    """The same call on one matrix of random x, and with ones for the epilogue's further vectors and scalars.

    Matrices stay as they are, because their layout decides how kernels read them. x keeps its leading axes beside a
    matrix that shares rows.
    """
    device, dtype = call.x.device, call.x.dtype
    generator = torch.Generator(device).manual_seed(0)
    is_shared = any(operand.shared for operand in call.epilogue.operands)
    lead = call.x.shape[:-1] if is_shared else (call.rows,)
    x = torch.randn((*lead, call.weight.shape[1]), generator=generator, device=device, dtype=dtype)
    operands = [each if each.dim() == x.dim() else torch.ones_like(each) for each in call.operands]
    return call._replace(x=x, operands=operands, out=None)


@dataclass(frozen=True)
class Candidate:
    """A candidate. `plan` is `TORCH`, or family, tile, raster, swizzle and splits."""

    plan: tuple[int, ...]
    text: str
    run: Callable[[], Tensor]


class Kind(NamedTuple):
    """What a set of kernels has in common: in this module a *family* is all kernels of one arithmetic."""

    arithmetic: str  # the arithmetic of their products
    packed: bool  # on fp16 slices: whether the split of the weight is not counted
    tf32_allowed: bool  # fp32: whether torch's GEMM may use TF32
    source: str  # where the planner's choice among them comes from: "model" or "cache"


@dataclass(frozen=True)
class Family:
    """The kernels of one arithmetic, and the fallback that they are compared with."""

    kind: Kind  # which ones
    candidates: list[Candidate]  # every plan whose kernels could be linked
    fallback: Candidate  # torch's GEMM, and one elementwise kernel where it is needed
    # torch's fp32 setting under which the fallback is to be timed
    setting: Callable[[], AbstractContextManager[None]]
    now: tuple[int, ...] = TORCH  # the plan that runs at present; `TORCH` where that is the fallback
    left_out: tuple[str, ...] = ()  # why other plans are no candidates: their kernels could not be linked


def families(call: LinearCall, *, within: float = _HOPELESS) -> Iterator[Family]:
    """Each arithmetic that the call may run in and whose kernels cover it, in the order in which they are tried.

    The epilogue is linked into the kernels of all of them before the first is given. Plans that are predicted to take
    more than `within` times the best are no candidates.
    """
    call = call._replace(out=call.new_out())
    considered = consider(call)
    every = [_planned(call, found, within) for found in considered.found.tried if found.tunable]
    planned = [each for each in every if each.plans and not plans.no_gemm_kernels()]
    why_not = _link(call, planned)
    for each in planned:
        yield _family(call, each, why_not)


class _Planned(NamedTuple):
    """One arithmetic's plans, with their descriptions, and the one that runs at present."""

    kind: Kind
    plans: dict[tuple[int, ...], str]
    now: tuple[int, ...]


_Reasons = dict[tuple[int, ...], str]  # by forced plan


def _planned(call: LinearCall, found: Tried, within: float) -> _Planned:
    answer = found.plan
    # The planner compares the fused TF32 kernel with a TF32 GEMM, whatever torch's setting is.
    tf32_allowed = call.x.dtype == torch.float32 and (call.order.tf32_allowed or not found.is_on_slices)
    kind = Kind(found.arithmetic, found.is_on_slices and found.packed, tf32_allowed, answer["source"])
    now = tuple(answer.get("plan", TORCH))
    return _Planned(kind, _every_plan(answer["candidates"], now, within), now)


def _forced(kind: Kind, plan: tuple[int, ...]) -> tuple[int, ...]:
    return dry_runs.ARITHMETICS.index(kind.arithmetic), *plan


def _link(call: LinearCall, planned: Sequence[_Planned]) -> _Reasons:
    """Link the kernels of all plans and of the fallback, in parallel; returns why some plans cannot run."""
    keys = [_forced(each.kind, plan) for each in planned for plan in each.plans]
    if not keys:
        return {}
    # Where the fallback's kernel cannot be linked, PyTorch's operators are the fallback.
    missing = [
        ",".join(dry_runs.dry_run(call, dry_runs.ALL_KEPT, plan=plan).missing)
        for plan in (*keys, dry_runs.FALLBACK)
    ]
    reasons = loading.link_each(call.epilogue, missing, call.x.device)
    return {key: reason for key, reason in zip(keys, reasons[:-1], strict=True) if reason}


def _family(call: LinearCall, planned: _Planned, why_not: _Reasons) -> Family:
    """The family of what could be linked."""
    kind, now = planned.kind, planned.now
    left_out = {plan: why_not.get(_forced(kind, plan), "") for plan in planned.plans}
    candidates = [
        Candidate(plan, text, Forced(call, _forced(kind, plan)))
        for plan, text in planned.plans.items()
        if not left_out[plan]
    ]
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    if kind.tf32_allowed and not call.order.tf32_allowed:
        setting = partial(_precision.switched, call.x.device.type, _precision.TF32)
    reasons = tuple(dict.fromkeys(filter(None, left_out.values())))
    torch_gemm = Candidate(TORCH, "the fallback", Forced(call, dry_runs.FALLBACK))
    return Family(kind, candidates, torch_gemm, setting, TORCH if left_out.get(now) else now, reasons)


def _every_plan(
    answers: Sequence[dict[str, Any]], now: tuple[int, ...], within: float
) -> dict[tuple[int, ...], str]:
    """The planner's candidates and `now`, the plan that runs at present, with every order of the tiles."""
    best = min((float(answer["predicted_us"]) for answer in answers), default=0.0)
    found: dict[tuple[int, ...], str] = {}
    for answer in answers:
        if answer["predicted_us"] > within * best and tuple(answer["plan"]) != now:
            continue
        family, tile, raster, swizzle, splits = answer["plan"]
        orders = [(raster, swizzle)]
        if answer["family"] != SWAP_AB:  # nearly all of its tiles are computed at once
            orders = list(product(range(len(_RASTERS)), sorted({1, max(1, swizzle // 2), swizzle})))
        for raster, swizzle in orders:
            walked = {**answer, "raster": _RASTERS[raster], "swizzle": swizzle, "splits": splits}
            found.setdefault((family, tile, raster, swizzle, splits), plans.tile_text(walked))
    return found
