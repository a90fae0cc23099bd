"""All candidates for a call: every plan of the fused kernels that cover it, and the fallback, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls.forecast import consider
from epigemm.calls.resolve import Forced
from epigemm.epilogues.kinds import KINDS
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans

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
    operands = []
    for place, (about, value) in enumerate(zip(call.epilogue.operands, call.operands, strict=True), 1):
        if isinstance(value, Tensor) and KINDS[about.kind].by_row:
            value = value if is_shared or value.dim() == 2 else value.reshape(call.rows, value.shape[-1])
        elif isinstance(value, Tensor) and place != call.epilogue.bias_place:
            value = torch.ones_like(value)
        operands.append(value)
    return call._replace(x=x, operands=operands, out=None)


class Candidate(NamedTuple):
    """A candidate. `plan` is `TORCH`, or family, tile, raster, swizzle and splits."""

    plan: tuple[int, ...]
    text: str
    run: Callable[[], Tensor]


class Family(NamedTuple):
    """The kernels of one arithmetic, and the fallback that they are compared with."""

    arithmetic: str
    packed: bool  # on fp16 slices: whether the split of the weight is not counted
    tf32_allowed: bool  # fp32: whether torch's GEMM may use TF32
    candidates: list[Candidate]  # every plan whose kernels could be linked
    fallback: Candidate  # torch's GEMM, and one elementwise kernel where it is needed
    # torch's fp32 setting under which the fallback is to be timed
    setting: Callable[[], AbstractContextManager[None]]
    now: tuple[int, ...] = TORCH  # the plan that runs at present; `TORCH` where that is the fallback
    left_out: tuple[str, ...] = ()  # why other plans are no candidates: their kernels could not be linked


def families(call: LinearCall, *, within: float = _HOPELESS) -> Iterator[Family]:
    """Each arithmetic that the call may run in and whose kernels cover it, in the order in which they are tried.

    The epilogue is linked into the kernels of all of them, in parallel, before the first is given. Plans that are
    predicted to take more than `within` times the best are no candidates.
    """
    if plans.no_gemm_kernels():
        return
    call = call._replace(out=call.new_out())
    wanted = [
        (found, dry_runs.ARITHMETICS.index(found.arithmetic), _every_plan(found.plan, within))
        for found in consider(call).found.tried
        if found.tunable and found.plan["candidates"]
    ]
    forced = [(number, *plan) for _, number, texts in wanted for plan in texts]
    if not forced:
        return
    # Where the fallback's kernel cannot be linked, PyTorch's operators are the fallback.
    dry = (dry_runs.dry_run(call, dry_runs.ALL_KEPT, plan=plan) for plan in (*forced, dry_runs.FALLBACK))
    linked = loader.link_each(call.epilogue, [",".join(each.missing) for each in dry], call.x.device)
    why_not = dict(zip(forced, linked, strict=False))
    for found, number, texts in wanted:
        # The planner compares the fused TF32 kernel with a TF32 GEMM, whatever torch's setting is.
        allowed = call.order.tf32_allowed
        is_switched = call.x.dtype == torch.float32 and not allowed and not found.is_on_slices
        now = tuple(found.plan.get("plan", TORCH))
        why = {plan: why_not.get((number, *plan), "") for plan in texts}
        linked_to = [plan for plan in texts if not why[plan]]
        yield Family(
            found.arithmetic,
            found.is_on_slices and found.packed,
            call.x.dtype == torch.float32 and (allowed or is_switched),
            [Candidate(plan, texts[plan], Forced(call, (number, *plan))) for plan in linked_to],
            Candidate(TORCH, "the fallback", Forced(call, dry_runs.FALLBACK)),
            partial(_precision.switched, call.x.device.type, _precision.TF32) if is_switched else nullcontext,
            TORCH if why.get(now) else now,
            tuple(dict.fromkeys(filter(None, why.values()))),
        )


def _every_plan(found: dict[str, Any], within: float) -> dict[tuple[int, ...], str]:
    """The planner's candidates and the plan that runs at present, with every order of the tiles."""
    answers, now = found["candidates"], found.get("plan")
    best = min(float(answer["predicted_us"]) for answer in answers)
    every: dict[tuple[int, ...], str] = {}
    for answer in answers:
        if answer["predicted_us"] > within * best and answer["plan"] != now:
            continue
        family, tile, raster, swizzle, splits = answer["plan"]
        orders = [(raster, swizzle)]
        if answer["family"] != SWAP_AB:  # nearly all of its tiles are computed at once
            orders = list(product(range(len(_RASTERS)), sorted({1, max(1, swizzle // 2), swizzle})))
        for raster, swizzle in orders:
            walked = {**answer, "raster": _RASTERS[raster], "swizzle": swizzle, "splits": splits}
            every.setdefault((family, tile, raster, swizzle, splits), plans.tile_text(walked))
    return every
