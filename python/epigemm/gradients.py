"""Derivatives of the operators: the registry's differentiable reference, re-run under autograd.

Each backward is made of differentiable operations itself, so that second derivatives are right. Matrix
products go through `epigemm::linear` again: they get the arithmetic that the forward call asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm import packs
from epigemm._native import ops
from epigemm.epilogues import BIAS, EPILOGUES, fold_batch_norm_reference


def linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `linear_backward` needs."""
    # Arguments at the end that have their default value may be missing; strict is the forward call's alone.
    epilogue, x, weight, bias, operands, scalars, precision, *pack_and_strict = inputs
    ctx.save_for_backward(x, weight, bias, *operands)
    ctx.epilogue, ctx.scalars, ctx.precision = epilogue, scalars, precision
    ctx.pack = pack_and_strict[0] if pack_and_strict else packs.FIND


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::linear`, in the order of its arguments."""
    x, weight, bias, *operands = ctx.saved_tensors
    _, needs_x, needs_weight, needs_bias, needs_operands, *others = ctx.needs_input_grad
    needs_acc = needs_x or needs_weight
    grad_acc: Tensor | None = grad
    grad_bias: Tensor | None = None
    grad_operands: list[Tensor | None] = [None] * len(operands)
    if ctx.epilogue == BIAS.name:
        grad_bias = _sum_rows(grad) if needs_bias else None
    else:
        acc = _accumulator(x, weight, ctx.precision, ctx.pack)
        grad_acc, grad_bias, *grad_operands = _epilogue_gradients(
            ctx, acc, bias, operands, grad.to(acc.dtype), (needs_acc, needs_bias, *needs_operands)
        )
        grad_acc = None if grad_acc is None else grad_acc.to(x.dtype)
    grad_x = grad_weight = None
    if needs_acc:
        assert grad_acc is not None
        if needs_x:
            grad_x = _product(grad_acc, weight.t(), ctx.precision)
        if needs_weight:
            grad_weight = _product(_rows(grad_acc).t(), _rows(x).t(), ctx.precision)
    # One more for each argument after the scalars.
    return (
        None,
        grad_x,
        grad_weight,
        grad_bias,
        grad_operands,
        _none_like(ctx.scalars),
        *(None for _ in others[1:]),
    )


def elementwise_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `elementwise_backward` needs."""
    epilogue, x, bias, operands, scalars = inputs
    ctx.save_for_backward(x, bias, *operands)
    ctx.epilogue, ctx.scalars = epilogue, scalars


def elementwise_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::elementwise`, in the order of its arguments."""
    x, bias, *operands = ctx.saved_tensors
    _, needs_x, needs_bias, needs_operands, _ = ctx.needs_input_grad
    grad_x, grad_bias, *grad_operands = _epilogue_gradients(
        ctx, x, bias, operands, grad, (needs_x, needs_bias, *needs_operands)
    )
    return None, grad_x, grad_bias, grad_operands, _none_like(ctx.scalars)


def fold_batch_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `fold_batch_norm_backward` needs."""
    ctx.save_for_backward(*inputs[:-1])
    ctx.eps = inputs[-1]


def fold_batch_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::fold_batch_norm`, in the order of its arguments."""
    like, *vectors = ctx.saved_tensors

    def fold(*tracked: Tensor | None) -> Tensor:
        return fold_batch_norm_reference(like, tracked, ctx.eps)

    return None, *_gradients_of(fold, vectors, grad, ctx.needs_input_grad[1:-1]), None


def _epilogue_gradients(
    ctx: Any,
    acc: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the epilogue alone with respect to (acc, bias, *operands)."""
    epilogue = EPILOGUES[ctx.epilogue]

    def apply(acc: Any, bias: Tensor | None, *operands: Any) -> Tensor:
        return epilogue.reference(acc, bias, operands, ctx.scalars)

    return _gradients_of(apply, (acc, bias, *operands), grad, needs)


def _gradients_of(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of `function(*inputs)` with respect to the inputs that need one; None for the others."""
    gradients: list[Tensor | None] = [None] * len(inputs)
    wanted = [index for index, need in enumerate(needs) if need]
    if not wanted:
        return gradients
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = {index: _tracked(inputs[index]) for index in wanted}
        found = torch.autograd.grad(
            function(*(aliases.get(index, tensor) for index, tensor in enumerate(inputs))),
            list(aliases.values()),
            grad,
            create_graph=create_graph,
            materialize_grads=True,
        )
    for index, gradient in zip(wanted, found, strict=True):
        gradients[index] = gradient
    return gradients


def _tracked(tensor: Tensor | None) -> Tensor:
    """An alias for autograd to follow: a tensor may be two arguments at once, and it may have a graph behind it."""
    assert tensor is not None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _accumulator(x: Tensor, weight: Tensor, precision: str, pack: str) -> Tensor:
    """x @ weight.T as the forward's epilogue saw it.

    Rounded to 16 bits it could overflow where the forward did not, or carry a small sum with the bias across
    the kink of a relu.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return _product(x, weight, precision, pack)
    rows = _rows(x)
    if x.is_cuda and not torch.is_grad_enabled():
        acc = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:  # elsewhere there is no such product, and it has no derivative of its own
        acc = torch.mm(rows.float(), weight.float().t())
    return acc.reshape(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, precision: str, pack: str = packs.FIND) -> Tensor:
    product: Tensor = ops.linear(BIAS.name, x, weight, None, [], [], precision, pack)
    return product


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _sum_rows(grad: Tensor) -> Tensor:
    return _rows(grad).sum(0)


def _none_like(scalars: Sequence[float]) -> list[None] | None:
    """The gradient of a float[] argument: autograd takes an empty list for a list of tensors."""
    return None if scalars else []
