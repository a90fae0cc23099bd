"""Calls that no kernel of epigemm computes, by PyTorch's operators: torch's GEMM, then the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import invariance, precision
from epigemm.arguments.calls import FoldCall, LinearCall
from epigemm.calls.invariant import row_of
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.registry import Epilogue, folded_by_reference

_torch_linear = torch.nn.functional.linear


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    # one for each operand of the epilogue; if it has rows, with as many dimensions as the result
    operands: Sequence[Any],
    fold: Sequence[Any] | None,  # what scale_batch_norm's are folded from: the vectors of `FOLDED`, then eps
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: bool,  # whether torch's own setting would be less accurate than the call asks for
) -> Tensor:
    """D = epilogue(x @ weight.T), for arguments that have been checked."""
    bias, place = None, 1 if epilogue.takes_bias else epilogue.bias_place
    if fold is not None:
        if x.dtype.itemsize == 2:  # the product is rounded with its bias
            bias, *others = fold
            fold = (None, *others)
        operands = folded_by_reference(x, fold[:-1], fold[-1])
    elif place is not None:  # rounded with the product, as PyTorch's operators do
        bias = operands[place - 1]
        added = None if epilogue.takes_bias else bias.new_full((), -0.0)
        operands = [*operands[: place - 1], added, *operands[place:]]
    result = epilogue.evaluate(_product(x, weight, bias, full_fp32), operands)
    return result if out is None else out.copy_(result)


def of_call(call: LinearCall, fold: FoldCall | None = None) -> Tensor:
    """A call whose arguments have been checked; `fold`: what its operands are folded from."""
    epilogue, x, weight, bias, operands, scalars, *_ = call
    given = () if fold is not None else epilogue.in_order(bias, operands, scalars)
    assert given is not None
    vectors = None if fold is None else (*fold.vectors, fold.eps)
    return linear(epilogue, x, weight, given, vectors, call.out, call.order.overrides)


def elementwise_by_reference(
    epilogue: Epilogue, x: Tensor, operands: Sequence[Any], fold: Sequence[Any] | None, out: Tensor | None
) -> Tensor:
    """D = epilogue(x), as `linear`. `out` may be x."""
    if fold is not None:
        operands = folded_by_reference(x, fold[:-1], fold[-1])
    is_by_rows = invariance.active and invariance.enabled() and x.is_cpu and x.dim() and x.numel()
    result = _each_row(epilogue, x, operands) if is_by_rows else epilogue.evaluate(x, operands)
    if out is None and result is not x and result.stride() == x.stride():
        return result
    return (torch.empty_like(x) if out is None else out).copy_(result)


def _each_row(epilogue: Epilogue, x: Tensor, operands: Sequence[Any]) -> Tensor:
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
    if full_fp32:
        with precision.full_fp32(x.device.type):
            return _product(x, weight, bias, False)
    if x.dim() == 2:
        return _torch_linear(x, weight, bias)
    product = _torch_linear(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, bias)  # K may be 0
    return unflattened(product, (*x.shape[:-1], weight.shape[0]))
