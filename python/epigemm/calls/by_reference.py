"""Calls that no kernel of epigemm computes, by PyTorch's operators: torch's GEMM, then the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import checks, invariance, precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls.invariant import row_of
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import Epilogue, Operands, compute_dtype, folded_by_reference

_torch_linear = torch.nn.functional.linear


def linear_by_reference(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Operands,  # one that has rows with as many dimensions as the result
    fold: Any,  # what scale_batch_norm's are folded from: the vectors of `FOLDED`, then eps; or None
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: bool,  # whether torch's own setting would be less accurate than the call asks for
) -> Tensor:
    """D = epilogue(x @ weight.T), for arguments that have been checked."""
    # The bias is rounded with the product, as PyTorch's operators do.
    if fold is None:
        bias, operands = epilogue.bias_among(operands), epilogue.without_bias(operands)
    else:
        bias, *vectors, eps = fold
        operands = folded_by_reference(x, (None, *vectors), eps)
    # A matrix by columns could give the result its layout.
    result = epilogue.reference(product(x, weight, bias, full_fp32=full_fp32), operands).contiguous()
    return result if out is None else out.copy_(result)


def of_call(call: LinearCall) -> Tensor:
    """A call whose arguments have been checked."""
    vectors = None if call.fold is None else (*call.fold.vectors, call.fold.eps)
    about = (call.operands, vectors, call.out, call.order.overrides)
    return linear_by_reference(call.epilogue, call.x, call.weight, *about)


def elementwise_by_reference(
    epilogue: Epilogue, x: Tensor, operands: Operands, fold: Any, out: Tensor | None
) -> Tensor:
    """D = epilogue(x), as `linear_by_reference`. `out` may be x."""
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


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, full_fp32: bool = False) -> Tensor:
    """x @ weight.T + bias by PyTorch's GEMM of matrices, which rounds once; `full_fp32` as above."""
    is_matrix = x.dim() == 2
    rows = x if is_matrix else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # K may be 0
    with precision.switched(x.device.type, precision.IEEE) if full_fp32 else nullcontext():
        found = _torch_linear(rows, weight, bias)
    return found if is_matrix else unflattened(found, (*x.shape[:-1], weight.shape[0]))


def in_derivative(call: LinearCall | ElementwiseCall) -> Tensor:
    """A call under a derivative of torch.func: by plain operations of PyTorch, one kernel each."""
    if isinstance(call, LinearCall) and call.invariant:
        raise RuntimeError(
            "batch_invariant: got a call under a derivative of torch.func, where plain PyTorch operations compute it; "
            "accepted there are calls outside of the mode"
        )
    checks.arguments(call)
    if call.out is not None:
        raise RuntimeError(
            "out: got a tensor under a derivative of torch.func; accepted is None, out= has no derivative"
        )
    if isinstance(call, LinearCall):
        if call.strict:
            raise RuntimeError(
                "strict: got True under a derivative of torch.func, where no fused kernel runs; accepted there is False"
            )
        if call.order.overrides:
            raise NotImplementedError(
                f"precision: got {call.precision!r} under a derivative of torch.func, where torch's fp32 setting is "
                "less accurate; accepted is None, or change torch's setting"
            )
        # The bias in the product: to 16 bits it is rounded once, with the bias, as in PyTorch.
        call = call.behind(_torch_linear(call.x, call.weight, call.bias))
    return call.epilogue.reference(call.x, call.operands)


def unfolded(z: Tensor, norm: Sequence[Tensor | None], eps: float, out: Tensor | None) -> Tensor:
    """batch_norm(z) by PyTorch's operators, where `checks.is_folded` says no; `norm`: FOLDED[2:]."""
    columns = z.shape[-1]
    checks.fold_batch_norm(z, (None, None, *norm), eps, columns)
    if out is not None:
        checks.arguments(ElementwiseCall(BIAS, z, out=out))
    wide = compute_dtype(z.dtype)
    # Without gaps: the backward of PyTorch's CPU kernel reads strided statistics wrongly.
    mean, var, gain, shift = (None if each is None else each.to(wide).contiguous() for each in norm)
    rows = (z.reshape(-1, columns) if z.dim() != 2 else z).to(wide)
    # Not F.batch_norm: that of torch 2.11 refuses an eps of 0, which these calls take.
    y = torch.batch_norm(rows, gain, shift, mean, var, False, 0.0, eps, False).to(z.dtype).view_as(z)
    return y if out is None else out.copy_(y)
