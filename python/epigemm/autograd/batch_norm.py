"""A linear layer with BatchNorm by the batch's own statistics behind it: one node of autograd.

The product (with the bias) and its columns' moments are one call, and y is one pass over the product. Saved are the
inputs, the product and its moments. The derivative reads product and gradient twice: for two sums, and for the
product's gradient. Second derivatives, and first ones that are traced, run the reference under autograd, where the
product is computed again: without the bias, on which no result depends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import LinearCall
from epigemm.autograd import gradient_products, gradients, nodes
from epigemm.calls import batch_norm, moments
from epigemm.calls.batch_norm import Norm, Running
from epigemm.calls.log import current
from epigemm.epilogues.library import BIAS
from epigemm.packs import weight_packs

_grad_enabled = torch.is_grad_enabled


class BatchNormCall(NamedTuple):
    """batch_norm((x @ weight.T + bias) * scale), and perhaps its ReLU."""

    product: LinearCall  # of `BIAS`
    norm: Norm
    running: Running

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """x, the linear layer's weight and bias, and the vectors."""
        return (self.product.x, self.product.weight, self.product.bias, *self.norm[:3])


def linear_batch_norm(call: BatchNormCall) -> Tensor:
    """The call, recorded."""
    result: Tensor = _apply(call, *call.inputs)
    return result


def forward(call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same below autograd; also the product with its bias, and the mean and the biased variance of its columns."""
    if current.log is not None:
        return current.log.made(forward, call)  # type: ignore[no-any-return]
    if not call.product.uses_pack:
        weight_packs.expire(call.product.weight)
    u, of_u = moments.with_moments(call.product, leaves_blocks=True)
    y = batch_norm.normalise(u, of_u, call.norm, call.running)
    return y, u, of_u.mean, of_u.var


def _save(ctx: Any, call: BatchNormCall, found: tuple[Tensor, ...]) -> Tensor:
    y, u, mean, var = found
    x, weight, _, scale, bn_weight, bn_bias = call.inputs
    # no tensor here: autograd would not see it
    ctx.eps, ctx.relu, ctx.precision = call.norm.eps, call.norm.relu, call.product.precision
    ctx.dtypes = [None if each is None else each.dtype for each in call.inputs]
    # Both, for derivatives of a higher order have both.
    product = (x, weight) if any(ctx.needs_input_grad[1:3]) else (None, None)
    # The bias of BatchNorm tells where its ReLU has cut.
    ctx.save_for_backward(u, mean, var, *product, scale, bn_weight, bn_bias if call.norm.relu else None)
    return y


def _gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    saved = ctx.saved_tensors  # once: a checkpoint makes them again each time
    u, mean, var, x, weight, scale, bn_weight, bn_bias = saved
    if _grad_enabled() or not gradient_products.runs_directly(grad, *saved):
        return _by_reference(ctx, grad, saved, needs)
    needs_x, needs_weight, *needs_vectors = needs
    dtypes = [dtype if need else None for dtype, need in zip(ctx.dtypes[2:], needs_vectors, strict=True)]
    of_product = u.dtype if needs_x or needs_weight else None
    norm = Norm(scale, bn_weight, bn_bias, ctx.eps, ctx.relu)
    found = batch_norm.gradients(grad, u, mean, var, norm, (of_product, *dtypes))
    if found.u is None:
        return [None, None, *found[1:]]
    of_inputs = gradient_products.product_gradients(
        found.u, x, weight, needs_x, needs_weight, False, ctx.precision
    )
    return [*of_inputs[:2], *found[1:]]


def _by_reference(ctx: Any, grad: Tensor, saved: Sequence[Any], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients in differentiable PyTorch."""
    known_u, _, _, x, weight, scale, bn_weight, bn_bias = saved
    *_, shift_dtype, _, _, bias_dtype = ctx.dtypes

    def zeros(dtype: torch.dtype | None) -> Tensor | None:  # whose values change no gradient
        return None if dtype is None else known_u.new_zeros(known_u.shape[1], dtype=dtype)

    def apply(x: Tensor | None, weight: Tensor, shift: Tensor | None, *vectors: Any) -> Tensor:
        u: Tensor = known_u
        if x is not None:
            u = ops.linear(BIAS.name, x, weight, None, [], [], ctx.precision)
        if shift is not None:
            u = u + shift.to(u.dtype)
        scale, bn_weight, bn_bias = vectors
        return batch_norm.reference(u, Norm(scale, bn_weight, bn_bias, ctx.eps, ctx.relu))

    inputs = (x, weight, zeros(shift_dtype), scale, bn_weight, bn_bias if ctx.relu else zeros(bias_dtype))
    return gradients.gradients_of(apply, inputs, grad, needs)


_apply = nodes.node("_LinearBatchNorm", forward, _save, _gradients)
