"""The fallback: torch's GEMM at the accuracy that is asked for, and one elementwise kernel where it is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import elementwise_kernels
from epigemm.epilogues.registry import BIAS
from epigemm.planning import decisions

_any_autocast = torch._C._is_any_autocast_enabled
_unsafe_view: Any = torch.ops.aten._unsafe_view.default
_addmm_activation_out = torch.ops.aten._addmm_activation.out


def linear(call: LinearCall, decision: int | None = None) -> Tensor:
    """The call by torch's GEMM, and one elementwise kernel where the GEMM does not do everything.

    `decision`: what was decided of the call, where that was asked.
    """
    gemm = gemm_of(call, decision)
    if call.epilogue is BIAS and (call.bias is None or gemm == decisions.WITH_BIAS):
        return _run(call, call.bias)
    if gemm == decisions.WITH_BIAS_AND_RELU:
        return _run(call, call.bias, relu=True)
    bias = None
    if gemm == decisions.WITH_BIAS or call.x.is_cpu:  # on a CPU as `linked.linear`
        call = call.with_bias_in_product()
    if gemm == decisions.WITH_BIAS or call.epilogue.is_linked:
        bias, call = call.bias, call._replace(bias=None)
    out = _run(call, bias)
    return elementwise_kernels.elementwise(ElementwiseCall(call.epilogue, out, *call[3:6], out))


def gemm_of(call: LinearCall, decision: int | None = None) -> int:
    """What torch's GEMM does in the fallback: a constant of `decisions`."""
    if decision is None:
        decision = decisions.decide(call, decisions.fp32_code(call), 0)
    return decisions.gemm(decision)


def unflattened(flat: Tensor, x: Tensor) -> Tensor:
    """A result of [M, N] with x's leading dimensions; no view of it, which could not be written in place later."""
    result: Tensor = _unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    return result


def _run(call: LinearCall, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """x @ weight.T, plus `bias`, with a ReLU behind it where that is asked for, by torch's GEMM."""
    x, weight, rows, out = call.x, call.weight, call.rows, call.out
    matrix = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
    with _precision.as_asked(call.precision, x):
        if out is None and not relu and not _any_autocast():
            # Under autocast an operator called directly must keep its dtype: torch casts this, but none with out=.
            flat = torch.nn.functional.linear(matrix, weight, bias).contiguous()
            return flat if matrix is x else unflattened(flat, x)
        out = call.new_out() if out is None else out
        try:
            flat = out if matrix is x else out.view(rows, weight.shape[0])
        except RuntimeError:  # leading dimensions of a caller's `out` that no single stride can walk
            flat = out.new_empty((rows, weight.shape[0]))
            _gemm_2d(matrix, weight, bias, flat, relu)
            return out.copy_(flat.view(out.shape))
        _gemm_2d(matrix, weight, bias, flat, relu)
        return out


def _gemm_2d(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, relu: bool) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    elif relu:
        _addmm_activation_out(bias, x, weight.t(), use_gelu=False, out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
