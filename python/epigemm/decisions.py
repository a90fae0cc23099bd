"""What runs a linear call, as csrc/call decides it: asked with the tensors, answered in numbers or in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm import plans
from epigemm import precision as _precision
from epigemm._native import entry, ops
from epigemm.epilogues import BIAS, Epilogue

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

linear_out = entry("_linear_out")
"""The native operator: decides, and launches a kernel that needs nothing but the tensors."""

Operands = tuple[Epilogue, Tensor, Tensor, Tensor | None, Sequence[Tensor], Sequence[float]]
"""The epilogue, x, weight, bias, further operands and scalars of a call."""


def fp32_code(x: Tensor, precision: str) -> int:
    """What an fp32 call may run on, as csrc/call numbers it; 0 for other dtypes.

    Raises:
        ValueError: unknown precision.
    """
    if x.dtype is not torch.float32:
        return 0
    try:
        return _precision.code(precision, x.device.type)
    except KeyError:
        raise _precision.unknown_precision(precision) from None


def decide(operands: Operands, code: int, slices: int, out: Tensor | None, *, launch: bool = False) -> int:
    """What runs a call, in one number: see `way`, `gemm`, `arithmetic`, `is_packed`, `is_padded` and `plan`.

    Args:
        operands: what is multiplied, and what follows.
        code: its `fp32_code`.
        slices: what the weight's slices cost, by `SHIFTS`.
        out: where the result goes; None: a new contiguous tensor.
        launch: launch the kernel where the way is `TENSORS`.
    """
    epilogue, x, weight, bias, vectors, scalars = operands
    if not (x.is_cuda or x.is_cpu):
        return WITH_BIAS << 2 if epilogue is BIAS and bias is not None else 0
    found: int = linear_out(
        epilogue.name,
        x,
        weight,
        bias,
        vectors or None,
        scalars or None,
        code,
        slices,
        _described(x),
        launch,
        out,
    )
    return found


def explain(operands: Operands, code: int, slices: int, out: Tensor | None) -> dict[str, Any]:
    """Every arithmetic that the call is tried in, in order, with its plan and why it does not run, in words."""
    epilogue, x, weight, bias, vectors, scalars = operands
    found: dict[str, Any] = json.loads(
        ops._explain_call(
            epilogue.name, x, weight, bias, vectors or None, scalars or None, code, slices, _described(x), out
        )
    )
    return found


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


def is_packed(decision: int) -> bool:
    """On slices: whether the weight's were not charged to the call."""
    return bool(decision >> 6 & 1)


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
