"""Calls that no kernel of epigemm computes, by PyTorch's operators: torch's GEMM, then the reference."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

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
    fold: Operands | None,  # what scale_batch_norm's are folded from: the vectors of `FOLDED`, then eps
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: bool,  # whether torch's own setting would be less accurate than the call asks for
) -> Tensor:
    """D = epilogue(x @ weight.T), for arguments that have been checked."""
    # The bias is rounded with the product, as PyTorch's operators do.
    if fold is None:
        bias, operands = epilogue.bias_among(operands), epilogue.without_bias(operands)
    else:
        bias, operands = _unfolded_bias(x, fold)
    result = epilogue.reference(_product(x, weight, bias, full_fp32), operands)
    return result if out is None else out.copy_(result)


def _unfolded_bias(like: Tensor, fold: Any) -> tuple[Tensor | None, Operands]:
    """The bias that is added to the product, and what all else is folded to."""
    bias, *vectors, eps = fold
    return bias, folded_by_reference(like, (None, *vectors), eps)


def of_call(call: LinearCall, fold: FoldCall | None = None) -> Tensor:
    """A call whose arguments have been checked; `fold`: what its operands are folded from."""
    vectors = None if fold is None else (*fold.vectors, fold.eps)
    return linear(call.epilogue, call.x, call.weight, call.operands, vectors, call.out, call.order.overrides)


def elementwise_by_reference(
    epilogue: Epilogue, x: Tensor, operands: Operands, fold: Any, out: Tensor | None
) -> Tensor:
    """D = epilogue(x), as `linear`. `out` may be x."""
    if fold is not None:
        operands = folded_by_reference(x, fold[:-1], fold[-1])
    is_by_rows = invariance.active and invariance.enabled() and x.is_cpu and x.dim() and x.numel()
    result: Tensor = _each_row(epilogue, x, operands) if is_by_rows else epilogue.reference(x, operands)
    if out is None and result is not x and result.stride() == x.stride():
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
