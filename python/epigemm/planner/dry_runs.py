"""Dry runs: `call::linear` of csrc/call says what a linear call would launch, and the reasons on the way."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.planner import plans
from epigemm.planner.reasons import Reason

PRODUCT, WITH_BIAS, WITH_BIAS_AND_RELU = range(3)
"""How much of a call torch's GEMM computes in the fallback."""

SHORT, THERE = 1, 2
"""Bits of the number `slices`: there is no memory for slices; the weight has a pack."""
SHIFTS = {_precision.SPLIT: 0, _precision.SCALED: 2}
"""The position of an arithmetic's bits in it."""
ALL_KEPT = sum(THERE << shift for shift in SHIFTS.values())
"""`slices` for a weight that has all packs."""

ROUTED, OUT_APART, OUT_PADDED, OTHER_SETTING, RAISES_SHORTAGE, CAST = 1, 2, 4, 8, 16, 32
"""Circumstances of a call, which csrc/call/forced.h explains."""

ARITHMETICS = (
    _precision.IEEE,
    _precision.TF32,
    _precision.SPLIT,
    _precision.SCALED,
    _precision.PROMOTED,
    _precision.FAST,
)
"""The arithmetics, by their numbers in csrc."""
ELEMENTS: dict[torch.dtype | None, int] = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float8_e4m3fn: 4,
}
"""The types of results of 8-bit factors, by their numbers in csrc."""
FALLBACK = (0, -1, 0, 0, 1, 1)
"""The forced plan that is the fallback."""


_NOT_TAKEN = "no kernel takes such tensors"
_NO_PLAN = {"why_not_covered": _NOT_TAKEN, "fallback_us": math.inf, "candidates": []}


class Tried(NamedTuple):
    """One of the arithmetics that are tried for a call."""

    arithmetic: str  # what its kernels multiply in
    why_not: str  # why no fused kernel runs in it; empty if one does
    plan: dict[str, Any]  # the planner's answer
    packed: bool  # on fp16 slices: whether the weight has a pack
    tf32_allowed: bool  # whether torch's GEMM, which the plan was compared with, may use TF32
    tunable: bool  # whether a measurement of it would hold for other calls of its sizes
    copies: tuple[str, ...]  # in 16 bits: which of x and weight are copied for the kernel, in words

    @property
    def is_on_slices(self) -> bool:
        """Whether its kernels multiply fp16 slices."""
        return self.arithmetic in SHIFTS

    @property
    def reads_weight(self) -> bool:
        """Whether its kernel reads an fp32 weight as it lies, and no slices of it are made."""
        return bool(self.plan.get("reads_weight"))


class DryRun(NamedTuple):
    """The result of a dry run."""

    answer: int  # where it ends: 0, or a `Reason`
    refused: str  # why a forced plan cannot run
    reasons: list[Reason]  # the reasons on the way, in order, each as if its remedy had been applied
    fused: bool  # whether a fused plan runs, not the fallback
    on_slices: bool  # whether that multiplies fp16 slices
    arithmetic: str  # what it multiplies in
    packed: bool  # on slices: whether the weight has a pack
    gemm: int  # what torch's GEMM does in the fallback
    plan: tuple[int, ...]  # family, tile, raster, swizzle, splits
    launches: list[str]  # in order; csrc/call/record.h names them
    missing: list[str]  # the kernels into which the epilogue has to be linked first; of a GPU elsewhere: all
    tried: list[Tried]  # every arithmetic, in order, if `tried` was asked for

    @property
    def reads_weight(self) -> bool:
        """Whether the kernel reads an fp32 weight as it lies, and no slices of it are made."""
        return "scales_of_weight" in self.launches

    @property
    def copies_nothing(self) -> bool:
        """Whether a kernel can read and write the tensors as they lie, so that the call needs no other."""
        return not self.answer and not {Reason.NOT_STORABLE, Reason.NOT_READABLE} & set(self.reasons)


def dry_run(
    call: LinearCall,
    slices: int = 0,
    place: Tensor | None = None,
    *,
    order: _precision.Order | None = None,
    circumstances: int = 0,
    plan: tuple[int, ...] = (),
    tried: bool = False,
    gpu: tuple[int, ...] = (),
) -> DryRun:
    """A dry run of a call on a CPU or a CUDA device.

    `slices`: what is known of the weight's slices, at `SHIFTS`. `place`: for meta tensors, a tensor on the device in
    question. `order`: the arithmetics to try; None: those of the call's precision. `circumstances`, `plan`: see
    csrc/call/forced.h. The launches "blocks" and "merge" are those of the result's statistics. `gpu`: a GPU that this
    machine need not have, as `GPU.numbers` has it, in place of the tensors' device; `missing` has all kernels then.

    Raises:
        RuntimeError: the numbers of `plan` name none.
    """
    epilogue, x, weight, operands, _, _, strict, invariant, out, weight2, statistics, *_ = call
    bias, tensors, scalars = epilogue.apart(operands)
    device = -1 if gpu else (x if place is None else place).get_device()
    if device >= 0:
        plans.usable(device)  # which the call to come asks, too
    is_elsewhere = bool(gpu)
    gpu = gpu or plans.gpu_numbers(device)
    described = (device, *gpu) if gpu or place is not None else None
    if order is None and is_elsewhere:
        order = order_on(call, "cuda")
    elif order is None:
        order = call.order if place is None else order_on(call, place.device.type)
    scales: tuple[Any, ...] = (None, None, 0, None)
    if (eight_bits := call.eight_bits) is not None:
        given = eight_bits.out_scale
        scales = (
            *eight_bits[:2],
            ELEMENTS[eight_bits.out_dtype],
            given if isinstance(given, Tensor) else None,
        )
    answer = ops._dry_linear(
        epilogue.name,
        x,
        weight,
        bias,
        tensors or None,
        scalars or None,
        out,
        order.number,
        circumstances | (OTHER_SETTING if order.overrides else 0),
        slices,
        strict,
        invariant,
        described,
        plan or None,
        tried,
        weight2,
        statistics,
        *scales,
        call.group_ends,
    )
    found: dict[str, Any] = json.loads(answer)
    found["reasons"] = [Reason(number) for number in found["reasons"]]
    found["plan"] = tuple(found["plan"])
    found["tried"] = [_tried(each) for each in found["tried"]]
    if tried and not found["tried"] and found["answer"] == Reason.DOES_NOT_FIT:
        found["tried"] = [Tried(order.fused[0], _NOT_TAKEN, _NO_PLAN, False, order.tf32_allowed, False, ())]
    return DryRun(**found)


def order_on(call: LinearCall, device_type: str) -> _precision.Order:
    """The arithmetics to try for a call of meta tensors on a device of this type."""
    if call.eight_bits is not None:
        return call.order
    is_fp32 = call.x.dtype is torch.float32
    return _precision.order(call.precision, device_type) if is_fp32 else _precision.ORDERS[0]


def _tried(found: dict[str, Any]) -> Tried:
    plan = found["plan"]
    why_not = "" if found["runs"] else str(found["why_not"] or plan["why_not"])
    return Tried(
        found["arithmetic"],
        why_not,
        plan,
        found["packed"],
        found["tf32_allowed"],
        found["tunable"],
        tuple(found["copies"]),
    )
