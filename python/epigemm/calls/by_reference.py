"""Calls that no kernel of epigemm computes, by PyTorch's operators: torch's GEMM, then the reference."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from epigemm.arguments import invariance, precision
from epigemm.arguments.calls import FoldCall, LinearCall
from epigemm.calls.invariant import row_of
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.registry import Epilogue, Operands, folded_by_reference

_torch_linear = torch.nn.functional.linear


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Operands,  # one that has rows with as many dimensions as the result
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: bool,  # whether torch's own setting would be less accurate than the call asks for
) -> Tensor:
    """D = epilogue(x @ weight.T), for arguments that have been checked."""
    # The bias is rounded with the product, as PyTorch's operators do.
    product = _product(x, weight, epilogue.bias_among(operands), full_fp32)
    result = epilogue.reference(product, epilogue.without_bias(operands))
    return result if out is None else out.copy_(result)


def of_call(call: LinearCall, fold: FoldCall | None = None) -> Tensor:
    """A call whose arguments have been checked; `fold`: what its operands are folded from."""
    if fold is None:
        return linear(call.epilogue, call.x, call.weight, call.operands, call.out, call.order.overrides)
    bias, *others = fold.vectors
    product = _product(call.x, call.weight, bias, call.order.overrides)
    result = call.epilogue.reference(product, folded_by_reference(fold.like, (None, *others), fold.eps))
    return result if call.out is None else call.out.copy_(result)


def elementwise_by_reference(epilogue: Epilogue, x: Tensor, operands: Operands, out: Tensor | None) -> Tensor:
    """D = epilogue(x), as `linear`."""
    is_by_rows = invariance.active and invariance.enabled() and x.is_cpu and x.numel() > 0
    result: Tensor = _each_row(epilogue, x, operands) if is_by_rows else epilogue.reference(x, operands)
    if out is None and x.is_contiguous():
        return result
    return (torch.empty_like(x) if out is None else out).copy_(result)


def _each_row(epilogue: Epilogue, x: Tensor, operands: Operands) -> Tensor:
    """Each row alone, at the same alignment: PyTorch's operators compute the ends of a tensor by other instructions."""
    every = x.reshape(-1, x.shape[-1])
    by_row = [KINDS[each.kind].by_row and each.kind != SCALAR for each in epilogue.operands]
    pairs = list(zip(operands, by_row, strict=True))
    rows = []
    for number in range(len(every)):
        given = [
            row_of(value, number, len(every)).clone() if has_rows and isinstance(value, Tensor) else value
            for value, has_rows in pairs
        ]
        rows.append(epilogue.reference(every[number : number + 1].clone(), given))
    return unflattened(torch.cat(rows), x.shape)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, full_fp32: bool) -> Tensor:
    is_matrix = x.dim() == 2
    rows = x if is_matrix else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # K may be 0
    with precision.full_fp32(x.device.type) if full_fp32 else nullcontext():
        product = _torch_linear(rows, weight, bias)
    return product if is_matrix else unflattened(product, (*x.shape[:-1], weight.shape[0]))
