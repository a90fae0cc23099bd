"""Calls that autograd records: one node per layer, reached without the dispatcher.

`torch.library.register_autograd` is right for every call, but takes the host hundreds of microseconds a layer, most
of it for nested arguments. Plain tensors that nothing traces take these nodes instead. Both save the same tensors and
run the same derivatives, those of `epigemm.gradients`.

Nothing here asks whether a call may come here: `roads` and `registration` do. Some argument requires a gradient,
gradients are enabled, and every tensor is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from epigemm import checks, entry, execution, fixed, gradients, packs, products
from epigemm.epilogues import BIAS, Epilogue
from epigemm.gradients import ElementwiseCall, LinearCall

Gradients = tuple[Tensor | None, ...]


def linear_forward(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack_use: str,
    strict: bool,
    invariant: bool,
    *,
    checked: bool = False,
) -> Tensor:
    """The operator `epigemm::linear` below autograd: checks the arguments, unless that is done, and runs the call."""
    if pack_use == packs.NONE:
        packs.expire(weight)
    if not invariant:
        found = entry.linear_operator(
            epilogue, x, weight, bias, operands, scalars, precision, pack_use, strict
        )
        if found is not None:
            return found
    if not checked:
        checks.linear(epilogue, x, weight, bias, operands, scalars, precision, None)
    forward = fixed.linear_forward if invariant else execution.linear_forward
    return forward(epilogue, x, weight, bias, operands, scalars, precision, pack_use=pack_use, strict=strict)


def elementwise_forward(
    epilogue: Epilogue, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
) -> Tensor:
    """The operator `epigemm::elementwise` below autograd."""
    found = entry.elementwise_operator(epilogue, x, bias, operands, scalars)
    if found is not None:
        return found
    checks.elementwise(epilogue, x, bias, operands, scalars, None)
    return execution.elementwise_forward(epilogue, x, bias, operands, scalars)


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack_use: str,
    strict: bool,
    invariant: bool,
    *,
    checked: bool = False,
) -> Tensor:
    """D = epilogue(x @ weight.T), recorded; `checked`: whether the arguments are known to fit."""
    if weight.requires_grad:
        # It is about to change, by whatever means: its pack would be made again in any case.
        pack_use = packs.NONE
    call = (epilogue, scalars, precision, pack_use, strict, invariant)
    if not gradients.keeps_product(epilogue, x, operands, strict):
        result: Tensor = _linear(call, x, weight, bias, *operands)
        return result
    if not checked:
        # Before anything is launched: the two kernels would not know what is wrong with the call as a whole.
        checks.linear(epilogue, x, weight, bias, operands, scalars, precision, None)
    result, _ = _linear_keeping_product(call, x, weight, bias, *operands)
    return result


def elementwise(
    epilogue: Epilogue, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
) -> Tensor:
    """D = epilogue(x), recorded."""
    result: Tensor = _elementwise((epilogue, scalars), x, bias, *operands)
    return result


def fold_batch_norm(
    like: Tensor, columns: int, vectors: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, Tensor]:
    """Multiplier and offset that `vectors` (those of `FOLDED`, checked) fold into, recorded."""
    multiplier, offset = _fold_batch_norm((eps, columns, like), *vectors)
    return multiplier, offset


class _Linear(Function):
    """A linear call whose derivative does without the product, or makes it again.

    Lists of tensors would not be seen by autograd: the epilogue's operands are arguments of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> Tensor:
        epilogue, scalars, precision, pack_use, strict, invariant = call
        result = linear_forward(
            epilogue, x, weight, bias, operands, scalars, precision, pack_use, strict, invariant
        )
        needs = ctx.needs_input_grad
        gradients.save_linear(ctx, call, x, weight, bias, operands, result, needs[1], needs[2])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return None, *gradients.linear_gradients(ctx, grad, ctx.needs_input_grad[1:])


class _LinearKeepingProduct(Function):
    """A linear call as two kernels: the derivative reads the product between them.

    The product is a second result, which callers do not see: as such it has this node behind it, so that a derivative
    made of it can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        epilogue, scalars, precision, pack_use, _, invariant = call
        product = linear_forward(
            BIAS, x, weight, bias, (), (), precision, pack_use, False, invariant, checked=True
        )
        result = elementwise_forward(epilogue, product, None, operands, scalars)
        needs = ctx.needs_input_grad
        ctx.call = call
        ctx.save_for_backward(x if needs[2] else None, weight if needs[1] else None, product, *operands)
        ctx.set_materialize_grads(False)
        return result, product

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_product: Tensor | None) -> Gradients:
        x, weight, product, *operands = ctx.saved_tensors
        epilogue, scalars, precision, *_ = ctx.call
        _, needs_x, needs_weight, needs_bias, *needs_operands = ctx.needs_input_grad
        needs_product = needs_x or needs_weight or needs_bias
        grad_operands: list[Tensor | None] = [None] * len(operands)
        if grad is not None:
            needs = (needs_product, False, *needs_operands)
            found, _, *grad_operands = gradients.elementwise_gradients(
                (epilogue, scalars), grad, product, None, operands, needs
            )
            grad_product = _sum(found, grad_product)
        if grad_product is None or not needs_product:
            return None, None, None, None, *grad_operands
        return (
            None,
            *products.product_gradients(
                grad_product, x, weight, needs_x, needs_weight, needs_bias, precision
            ),
            *grad_operands,
        )


class _Elementwise(Function):
    @staticmethod
    def forward(ctx: Any, call: ElementwiseCall, x: Tensor, bias: Tensor | None, *operands: Tensor) -> Tensor:
        epilogue, scalars = call
        result = elementwise_forward(epilogue, x, bias, operands, scalars)
        ctx.call = call
        ctx.save_for_backward(x, bias, *operands)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, bias, *operands = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        return None, *gradients.elementwise_gradients(ctx.call, grad, x, bias, operands, needs)


class _FoldBatchNorm(Function):
    """A fold. Its values do not depend on those of x, which therefore is no argument that autograd sees."""

    @staticmethod
    def forward(ctx: Any, call: tuple[float, int, Tensor], *vectors: Tensor | None) -> tuple[Tensor, ...]:
        eps, columns, like = call
        result = execution.fold_batch_norm_forward(like, columns, vectors, eps)
        gradients.save_fold_batch_norm(ctx, like, vectors, eps)
        return result.unbind(0)

    @staticmethod
    def backward(ctx: Any, grad_multiplier: Tensor, grad_offset: Tensor) -> Gradients:
        needs = ctx.needs_input_grad[1:]
        _, _, *vectors = ctx.saved_tensors  # the bias as it was
        if torch.is_grad_enabled() or not products.runs_directly(grad_multiplier, grad_offset, *vectors):
            grad = torch.stack((grad_multiplier, grad_offset))
            return None, *gradients.fold_batch_norm_gradients(ctx, grad, needs)
        found = gradients.gradients_of_fold(grad_multiplier, grad_offset, vectors, ctx.eps, needs)
        return None, *found


def _apply(node: Any) -> Callable[..., Any]:
    """`node.apply`, without what it does for torch.func's transforms: none is at work here."""
    found: Callable[..., Any] = super(Function, node).apply
    return found


_linear = _apply(_Linear)
_linear_keeping_product = _apply(_LinearKeepingProduct)
_elementwise = _apply(_Elementwise)
_fold_batch_norm = _apply(_FoldBatchNorm)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
