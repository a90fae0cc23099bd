"""Matrix products of the derivatives: by the operator, by its implementation, or by torch's GEMM.

If a backward pass is traced, batched or differentiated, the operator `epigemm::linear` computes them: it supports all
of these, and gets the arithmetic that the forward call asked for. Otherwise the operator's implementation is called
directly, or torch's GEMM where that would run in any case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, resolve
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.library import BIAS
from epigemm.planner import plans

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_mm = torch.mm

# Which products of a backward pass are not simply torch's.
_NO_PRODUCT = 0  # false; the others are true
_STRAIGHT_ONES = 1  # a 16-bit kernel of ours takes a copy of a transposed matrix
_EVERY_ONE = 2


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether kernels may be launched on these tensors directly, because nothing traces or batches them."""
    return entry.sees(*tensors) is not entry.NOT_PLAIN


def product_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    precision: str,
) -> list[Tensor | None]:
    """Gradients of x @ weight.T + bias with respect to (x, weight, bias), where they are needed.

    x may be None if the weight needs no gradient, and the weight if x needs none.
    """
    is_matrix = grad.dim() == 2
    rows = grad if is_matrix else rows_of(grad)
    grad_x = grad_weight = None
    if _grad_enabled() or not runs_directly(grad, x, weight):
        if needs_x:
            grad_x = _linear(grad, weight.t(), precision)
        if needs_weight:
            grad_weight = _linear(rows.t(), rows_of(x).t(), precision)
    else:
        if needs_weight and not is_matrix:
            x = rows_of(x)
        own = _own_products(rows, precision)
        x_is_own = needs_x and own and (own == _EVERY_ONE or rows.stride(1) == weight.stride(0) == 1)
        weight_is_own = needs_weight and own and (own == _EVERY_ONE or rows.stride(0) == x.stride(0) == 1)
        if x_is_own or weight_is_own:
            asked = x if weight_is_own else None, weight if x_is_own else None
            grad_x, grad_weight = entry.products(rows, *asked, precision)
        if needs_x:
            if grad_x is None:
                grad_x = _product_at_once(rows, weight.t(), precision) if x_is_own else _mm(rows, weight)
            if not is_matrix:
                grad_x = unflattened(grad_x, (*grad.shape[:-1], grad_x.shape[-1]))
        if needs_weight and grad_weight is None:
            columns = rows.t()
            grad_weight = _product_at_once(columns, x.t(), precision) if weight_is_own else _mm(columns, x)
    return [grad_x, grad_weight, rows.sum(0) if needs_bias else None]


def accumulator(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """x @ weight.T as the forward's epilogue saw it.

    If it were rounded to 16 bits, it could overflow where the forward pass did not, or change the sign of its sum with
    the bias, at which a relu has its kink.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        direct = not _grad_enabled() and runs_directly(x, weight)
        return (_product_at_once if direct else _linear)(x, weight, precision)
    rows = rows_of(x)
    if x.is_cuda and not _grad_enabled():
        acc = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:  # on other devices there is no such product; and it has no derivative of its own
        acc = torch.mm(rows.float(), weight.float().t())
    return unflattened(acc, (*x.shape[:-1], weight.shape[0]))


def _product_at_once(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """x @ weight.T, if nothing traces or differentiates this. The operator would take the host longer."""
    return resolve.run(LinearCall(BIAS, x, weight, precision=precision))


def _linear(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """x @ weight.T by the operator, which may be traced and differentiated."""
    product: Tensor = ops.linear(BIAS.name, x, weight, None, [], [], precision)
    return product


def _own_products(rows: Tensor, precision: str) -> int:
    """Which products with `rows` are not simply torch's: `_NO_PRODUCT`, `_STRAIGHT_ONES` or `_EVERY_ONE`."""
    if _any_autocast():
        return _EVERY_ONE
    if plans.has_gpu_kernels(rows):
        return _STRAIGHT_ONES if rows.element_size() == 2 else _EVERY_ONE
    if precision == _precision.DEFAULT or rows.dtype is not torch.float32:
        return _NO_PRODUCT
    return _EVERY_ONE if _precision.order(precision, rows.device.type).overrides else _NO_PRODUCT


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix: all its leading dimensions in one."""
    if x.dim() == 2:
        return x
    # Not `flatten`, for which `torch.autograd.grad(is_grads_batched=True)` has no rule.
    return x.unsqueeze(0) if x.dim() == 1 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
