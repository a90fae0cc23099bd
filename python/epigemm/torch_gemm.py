"""torch's own GEMM: what it does in one kernel, and the call of it at the accuracy that is asked for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epigemm import plans
from epigemm import precision as _precision
from epigemm.epilogues import BIAS, BIAS_RELU, Epilogue

_CUBLAS_DEVICES = ("cuda",)
_RELU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _RELU_DTYPES}
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


def adds_bias(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> bool:
    """Whether torch's GEMM is to do everything, which is at most to add a bias."""
    return epilogue is BIAS and (
        bias is None
        or x.device.type not in _CUBLAS_DEVICES
        or not _is_faster_without_bias(x, weight, precision)
    )


def adds_relu(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    out: Tensor | None,
) -> bool:
    """Whether torch's GEMM is to add the bias and apply the ReLU itself, rounding once.

    cuBLASLt does in these dtypes and layouts. Without any K torch would leave the ReLU out; a single column it
    computes as a matrix times a vector, and rounds before it adds the bias.
    """
    return (
        epilogue is BIAS_RELU
        and bias is not None
        and x.device.type in _CUBLAS_DEVICES
        and x.dtype in _RELU_DTYPES
        and bias.is_contiguous()
        and (out is None or out.is_contiguous())
        and x.numel() > 0
        and weight.shape[0] > 1
        and not _is_faster_without_bias(x, weight, precision)
    )


def _is_faster_without_bias(x: Tensor, weight: Tensor, precision: str) -> bool:
    """Whether cuBLAS's plain product and one kernel of ours are expected to be faster than its product with a bias.

    cuBLAS splits a long K for the plain product alone: on an H200 the fp32 product with bias and ReLU took 202 us at
    16x8192x8192, the plain product and one kernel of ours 151.
    """
    n, k = weight.shape
    dtype = _DTYPE_NAMES.get(x.dtype)
    if dtype is None or not k or not plans.has_gpu_kernels(x):
        return False
    tf32_allowed = x.dtype == torch.float32 and _precision.roads(precision, x.device.type).tf32_allowed
    return not plans.is_fallback_one_kernel(x.numel() // k, n, k, dtype, tf32_allowed, x.get_device())


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
