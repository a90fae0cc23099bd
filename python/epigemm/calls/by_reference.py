"""Calls that no kernel of epigemm computes, by PyTorch's operators: torch's GEMM, then the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import invariance, precision
from epigemm.arguments.calls import FoldCall, LinearCall
from epigemm.calls.invariant import row_of
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.registry import folded_by_reference

_torch_linear = torch.nn.functional.linear


def linear(
    epilogue: Any,
    x: Tensor,
    weight: Tensor,
    # one for each operand of the epilogue; if it has rows, with as many dimensions as the result
    operands: Sequence[Any],
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: bool,  # whether torch's own setting would be less accurate than the call asks for
) -> Tensor:
    """D = epilogue(x @ weight.T), for an epilogue that is made at run time and for arguments that have been checked."""
    bias, place = None, epilogue.bias_place
    if place is not None:  # rounded with the product, as PyTorch's operators do
        bias = operands[place - 1]
        operands = [*operands[: place - 1], bias.new_full((), -0.0), *operands[place:]]
    result: Tensor = epilogue.evaluate(_product(x, weight, bias, full_fp32), operands)
    return result if out is None else out.copy_(result)


def of_call(call: LinearCall, fold: FoldCall | None = None) -> Tensor:
    """A call whose arguments have been checked; `fold`: what its operands are folded from."""
    bias, operands = call.bias, call.operands
    if fold is not None:
        bias, *others = fold.vectors
        operands = folded_by_reference(fold.like, (None, *others), fold.eps)
    else:
        call = call.with_bias_in_product()
        bias, operands = call.bias, call.operands
    product = _product(call.x, call.weight, bias, call.order.overrides)
    result = call.epilogue.reference(product, None, operands, call.scalars)
    return result if call.out is None else call.out.copy_(result)


def elementwise_by_reference(epilogue: Any, x: Tensor, operands: Sequence[Any], out: Tensor | None) -> Tensor:
    """D = epilogue(x), as `linear`."""
    is_by_rows = invariance.active and invariance.enabled() and x.is_cpu and x.numel() > 0
    result: Tensor = _each_row(epilogue, x, operands) if is_by_rows else epilogue.evaluate(x, operands)
    if out is None and x.is_contiguous():
        return result
    return (torch.empty_like(x) if out is None else out).copy_(result)


def _each_row(epilogue: Any, x: Tensor, operands: Sequence[Any]) -> Tensor:
    """Each row alone, at the same alignment: PyTorch's operators compute the ends of a tensor by other instructions."""
    every = x.reshape(-1, x.shape[-1])
    by_row = [KINDS[each.kind].by_row and each.kind != SCALAR for each in epilogue.operands[1:]]
    pairs = list(zip(operands, by_row, strict=True))
    rows = []
    for number in range(len(every)):
        given = [
            row_of(value, number, len(every)).clone() if has_rows else value for value, has_rows in pairs
        ]
        rows.append(epilogue.evaluate(every[number : number + 1].clone(), given))
    return unflattened(torch.cat(rows), x.shape)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, full_fp32: bool) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # K may be 0
    with precision.full_fp32(x.device.type) if full_fp32 else nullcontext():
        product = _torch_linear(rows, weight, bias)
    return unflattened(product, (*x.shape[:-1], weight.shape[0]))
