"""torch's own GEMM, at the accuracy that is asked for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epigemm import precision as _precision

_any_autocast = torch._C._is_any_autocast_enabled
_unsafe_view: Any = torch.ops.aten._unsafe_view.default
_addmm_activation_out = torch.ops.aten._addmm_activation.out


def new_output(x: Tensor, weight: Tensor) -> Tensor:
    """An empty contiguous tensor for x @ weight.T."""
    if x.dim() == 2:
        # Twice as fast as new_empty with a tuple.
        return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def unflattened(flat: Tensor, x: Tensor) -> Tensor:
    """A result of [M, N] with x's leading dimensions; no view of it, which could not be written in place later."""
    result: Tensor = _unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    return result


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    out: Tensor | None,
    *,
    relu: bool = False,
) -> Tensor:
    """x @ weight.T, plus bias, with a ReLU behind it where that is asked for, by torch's GEMM."""
    if (
        precision != _precision.DEFAULT
        and x.dtype == torch.float32
        and _precision.needs_override(precision, x.device.type)
    ):
        with _precision.full_fp32(x.device.type):
            return _torch_linear(x, weight, bias, out, relu)
    return _torch_linear(x, weight, bias, out, relu)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, relu: bool) -> Tensor:
    if out is None:
        # Under autocast an operator called directly must keep its dtype: torch casts this function, but none
        # with out=.
        if not relu and not _any_autocast():
            if x.dim() == 2:
                return torch.nn.functional.linear(x, weight, bias).contiguous()
            matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            return unflattened(torch.nn.functional.linear(matrix, weight, bias).contiguous(), x)
        out = new_output(x, weight)
    if x.dim() == 2:
        _gemm_2d(x, weight, bias, out, relu)
        return out
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    x = x.reshape(rows, x.shape[-1])
    try:
        flat = out.view(rows, columns)
    except RuntimeError:
        # Leading dimensions of a caller's `out` that no single stride can walk.
        flat = out.new_empty((rows, columns))
        _gemm_2d(x, weight, bias, flat, relu)
        return out.copy_(flat.view(out.shape))
    _gemm_2d(x, weight, bias, flat, relu)
    return out


def _gemm_2d(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, relu: bool) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    elif relu:
        _addmm_activation_out(bias, x, weight.t(), use_gelu=False, out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
