"""What runs a linear call, as csrc/call decides it: asked with the tensors, answered in numbers or in words."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from epigemm._native import operator, ops
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.registry import BIAS
from epigemm.planning import plans

# The number that `_linear_out` returns, from its lowest bit on: which way (2 bits), what torch's GEMM does in the
# fallback (2), and on slices: the arithmetic (2), whether the weight's are not charged to the call, whether the result
# needs padded rows, and the plan: family (8), tile (8), raster (1), swizzle (4), splits (4).
FALLBACK, TENSORS, SLICES = range(3)
"""Which way a call runs: torch's GEMM, one kernel on the tensors as they lie, or the kernels on fp16 slices."""
PRODUCT, WITH_BIAS, WITH_BIAS_AND_RELU = range(3)
"""What torch's GEMM does of a call."""
_ARITHMETICS = (_precision.IEEE, _precision.TF32, _precision.SPLIT, _precision.SCALED)

PER_CALL, NO_COST, STALE = range(3)
"""What the weight's slices cost a call: they are made by it; they are there; they are made for it or for many."""
SHORT = 4
"""Beside the cost: there is no memory for slices."""
SHIFTS = {_precision.SPLIT: 0, _precision.SCALED: 3}
"""Where the cost of an arithmetic's slices stands in `slices`."""

linear_out = operator("_linear_out")
"""The native operator: decides, and launches a kernel that needs nothing but the tensors."""


def fp32_code(call: LinearCall) -> int:
    """What an fp32 call may run on, as csrc/call numbers it; 0 for other dtypes; ValueError: unknown precision."""
    is_fp32 = call.x.dtype is torch.float32
    return _precision.code(call.precision, call.x.device.type) if is_fp32 else 0


def order(call: LinearCall) -> _precision.Order:
    """What a call may run on; only fp32 has a choice."""
    return _precision.road(fp32_code(call))


def decide(
    call: LinearCall, code: int, slices: int, place: Tensor | None = None, *, launch: bool = False
) -> int:
    """What runs a call, in one number: see `way`, `gemm`, `arithmetic`, `is_padded` and `plan`.

    `slices`: what the weight's cost, by `SHIFTS`. `place`: a tensor on the device that a call of meta tensors is for.
    `launch`: launch the kernel where the way is `TENSORS`.
    """
    x = call.x if place is None else place
    if not (x.is_cuda or x.is_cpu):
        return WITH_BIAS << 2 if call.epilogue is BIAS and call.bias is not None else 0
    found: int = linear_out(*_asked(call, code, slices, place), launch, call.out)
    return found


def explain(call: LinearCall, code: int, slices: int, place: Tensor | None = None) -> dict[str, Any]:
    """Every arithmetic that the call is tried in, in order, with its plan and why it does not run, in words."""
    found: dict[str, Any] = json.loads(ops._explain_call(*_asked(call, code, slices, place), call.out))
    return found


def missing_kernels(call: LinearCall, code: int, slices: int, place: Tensor | None = None) -> str:
    """The open kernels that the call would run and that its epilogue was not linked into: names between commas."""
    names: str = ops._missing_kernels(*_asked(call, code, slices, place), call.out)
    return names


def _asked(call: LinearCall, code: int, slices: int, place: Tensor | None) -> tuple[Any, ...]:
    epilogue, x, weight, bias, operands, scalars, *_ = call
    tensors = (epilogue.name, x, weight, bias, operands or None, scalars or None)
    if place is None:
        return (*tensors, code, slices, call.invariant, _described(x))
    device = place.get_device()
    return (*tensors, code, slices, call.invariant, (device, *plans.gpu_numbers(device)))


def _described(x: Tensor) -> tuple[int, ...] | None:
    """A GPU that is described to the planner in place of x's device: tests do that."""
    device = x.get_device()
    numbers = plans.gpu_numbers(device)
    return (device, *numbers) if numbers else None


def way(decision: int) -> int:
    """`FALLBACK`, `TENSORS` or `SLICES`."""
    return decision & 3


def gemm(decision: int) -> int:
    """What torch's GEMM does in the fallback, whether that runs or not."""
    return decision >> 2 & 3


def arithmetic(decision: int) -> str:
    """What a fused kernel multiplies in."""
    return _ARITHMETICS[decision >> 4 & 3]


def is_padded(decision: int) -> bool:
    """On slices: whether the result is stored elsewhere, in rows of whole 16 bytes, and copied."""
    return bool(decision >> 7 & 1)


def plan(decision: int) -> tuple[int, ...]:
    """The fused kernel's plan, as the native operators take it."""
    return (
        decision >> 8 & 255,
        decision >> 16 & 255,
        decision >> 24 & 1,
        decision >> 25 & 15,
        decision >> 29 & 15,
    )
