"""Runs a checked call: one fused kernel where there is one, else torch's GEMM and one elementwise kernel.

Nothing here looks at autograd or checks arguments: `functional` and `registration` come here when that is
done. Outputs are allocated by torch, so that running out of memory stays `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from epigemm import precision as _precision
from epigemm._native import cuda_status, ops
from epigemm.epilogues import BIAS, Epilogue, compute_dtype, fold_batch_norm_reference

_any_autocast = torch._C._is_any_autocast_enabled
_fused_linear_out = ops._fused_linear_out.default
_elementwise_out = ops._elementwise_out.default
_fold_batch_norm_out = ops._fold_batch_norm_out.default


def linear_forward(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None = None,
) -> Tensor:
    """D = epilogue(x @ weight.T) into `out`, or into a new contiguous tensor of shape `[..., N]`."""
    if x.is_cuda and not cuda_status(x.get_device()):
        if out is None:
            out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        arithmetic = linear_arithmetic(x, precision)
        if _fused_linear_out(epilogue.name, x, weight, bias, operands, scalars, arithmetic, [], out):
            return out
    if epilogue is BIAS:
        return _gemm(x, weight, bias, precision, out)
    out = _gemm(x, weight, None, precision, out)
    return elementwise_forward(epilogue, out, bias, operands, scalars, out)


def elementwise_forward(
    epilogue: Epilogue,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    out: Tensor | None = None,
) -> Tensor:
    """D = epilogue(x) into `out` (which may be x itself), or into a new tensor laid out as `torch.empty_like(x)`."""
    if out is None:
        out = torch.empty_like(x)
    if has_native_kernels(x):
        _elementwise_out(epilogue.name, x, bias, operands, scalars, out)
    else:
        out.copy_(epilogue.reference(x, bias, operands, scalars))
    return out


def fold_batch_norm_forward(
    like: Tensor, columns: int, vectors: Sequence[Tensor | None], eps: float
) -> Tensor:
    """The BatchNorm fold, `[2, columns]`: multiplier and offset in the epilogue's arithmetic type."""
    if not has_native_kernels(like):
        return fold_batch_norm_reference(like, vectors, eps)
    folded = torch.empty((2, columns), dtype=compute_dtype(like.dtype), device=like.device)
    _fold_batch_norm_out(*vectors, eps, folded)
    return folded


def has_native_kernels(x: Tensor) -> bool:
    """Whether epigemm's elementwise kernels run on x's device; otherwise the PyTorch reference stands in."""
    return x.is_cpu or (x.is_cuda and not cuda_status(x.get_device()))


def linear_arithmetic(x: Tensor, precision: str) -> str:
    """The arithmetic of a call on x; only fp32 has a choice."""
    return _precision.resolve(precision, x.device.type) if x.dtype == torch.float32 else _precision.IEEE


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, out: Tensor | None) -> Tensor:
    """x @ weight.T, plus bias, by torch's GEMM."""
    if (
        precision != _precision.DEFAULT
        and x.dtype == torch.float32
        and _precision.needs_override(precision, x.device.type)
    ):
        with _precision.full_fp32(x.device.type):
            return _torch_linear(x, weight, bias, out)
    return _torch_linear(x, weight, bias, out)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        # Under autocast an operator called directly must keep its dtype: torch casts this function, but none
        # with out=.
        if not _any_autocast():
            return torch.nn.functional.linear(x, weight, bias).contiguous()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if x.dim() == 2:
        _gemm_2d(x, weight, bias, out)
        return out
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    x = x.reshape(rows, x.shape[-1])
    try:
        flat = out.view(rows, columns)
    except RuntimeError:
        # Leading dimensions of a caller's `out` that no single stride can walk.
        flat = out.new_empty((rows, columns))
        _gemm_2d(x, weight, bias, flat)
        return out.copy_(flat.view(out.shape))
    _gemm_2d(x, weight, bias, flat)
    return out


def _gemm_2d(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
