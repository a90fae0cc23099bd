"""Derivatives of the operators.

What is saved is what PyTorch's unfused operators would save, as far as the derivative can do with that: x only for the
weight's gradient and the weight only for that of x, so that either may be overwritten where it is not needed; of a relu
the result, whose sign is the derivative; before any other epilogue the product (`keeps_product` says where, and the
call is then two kernels). So first derivatives cost no further product, and no later write to a
bias, counted or not, concerns them: one kernel for the epilogue's derivative, made of the functors themselves
(csrc/epilogue/dual.h), then the products for x and the weight.

A strict call stays one operator, and so does one in 16 bits whose bias is folded into its epilogue: the derivative
makes the product again, with the bias from a copy. Second derivatives go through the registry's differentiable
reference, re-run under autograd; so do traced first ones, whose pointwise operations a compiler fuses with what is
around. Matrix products go through `epigemm::linear` again: they get the arithmetic that the forward call asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm import execution, packs, plans, shortcut, torch_gemm
from epigemm import precision as _precision
from epigemm._native import ops
from epigemm.epilogues import (
    BIAS,
    BIAS_RELU,
    EPILOGUES,
    SCALE_BATCH_NORM,
    Epilogue,
    fold_batch_norm_reference,
)

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_functional = torch._is_functional_tensor
_any_autocast = torch._C._is_any_autocast_enabled
_mm = torch.mm
_threshold_backward: Any = torch.ops.aten.threshold_backward.default

ElementwiseCall = tuple[Epilogue, Sequence[float]]
"""An epilogue and its scalars."""
LinearCall = tuple[Epilogue, Sequence[float], str, str, bool, bool]
"""All that a linear call is given beside tensors: epilogue, scalars, precision, use of the pack, strict, invariant."""

# Which products of a backward pass are not simply torch's.
_NO_PRODUCT = 0
_STRAIGHT_ONES = 1  # no 16-bit kernel of ours reads a transposed matrix
_EVERY_ONE = 2


def without_product(epilogue: Epilogue, operands: Sequence[Tensor]) -> bool:
    """Whether the derivatives of `epigemm::linear` do without the product that the epilogue was applied to."""
    if epilogue is SCALE_BATCH_NORM:  # linear in the product: only the vectors' own gradients read it
        return not any(operand.requires_grad for operand in operands)
    return epilogue is BIAS or epilogue is BIAS_RELU


def keeps_product(epilogue: Epilogue, x: Tensor, operands: Sequence[Tensor], strict: bool) -> bool:
    """Whether a recorded linear call is two kernels, for its derivative to read the product between them.

    Saving it takes one more pass over the result, computing it again a matrix product. Eager saves it, too; rounded to
    the tensors' dtype, as here. A strict call stays one kernel. So does one whose bias is folded into 16-bit numbers'
    epilogue: a product that is rounded to 16 bits before its bias is added loses what the two cancel to.
    """
    return not (
        without_product(epilogue, operands)
        or strict
        or (epilogue is SCALE_BATCH_NORM and x.element_size() == 2)
    )


def save_linear(
    ctx: Any,
    call: LinearCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    output: Tensor,
    needs_x: bool,
    needs_weight: bool,
) -> None:
    """Save what `linear_gradients` needs."""
    ctx.call, epilogue = call, call[0]
    again = ctx.again = not without_product(epilogue, operands)
    if again:
        ctx.save_for_backward(x, weight, None, bias, _snapshot(bias), *operands)
        return
    ctx.save_for_backward(
        x if needs_weight else None,
        weight if needs_x else None,
        output if epilogue is BIAS_RELU else None,
        *operands,
    )


def linear_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients with respect to (x, weight, bias, *operands), where `needs` asks for them."""
    if ctx.again:
        return _gradients_by_product(ctx, grad, needs)
    x, weight, output, *operands = ctx.saved_tensors
    epilogue, _, precision, *_ = ctx.call
    if epilogue is BIAS_RELU:
        grad = _threshold_backward(grad, output, 0)
    elif epilogue is not BIAS:
        grad = _derivative_of_scale(grad, operands)
    found = product_gradients(grad, x, weight, needs[0], needs[1], needs[2], precision)
    return found + [None] * len(operands) if operands else found


def _gradients_by_product(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """As `linear_gradients`, where the product has to be made again."""
    x, weight, _, bias, snapshot, *operands = ctx.saved_tensors
    epilogue, scalars, precision, pack, *_ = ctx.call
    needs_x, needs_weight, needs_bias, *needs_operands = needs
    acc = _accumulator(x, weight, precision, pack)
    found, grad_bias, *grad_operands = _epilogue_gradients(
        (epilogue, scalars),
        acc,
        bias if _grad_enabled() else snapshot,
        operands,
        grad.to(acc.dtype),
        (needs_x or needs_weight, needs_bias, *needs_operands),
    )
    grad_x = grad_weight = None
    if found is not None:
        grad_acc = found.to(grad.dtype)
        grad_x, grad_weight, _ = product_gradients(
            grad_acc, x, weight, needs_x, needs_weight, False, precision
        )
    return [grad_x, grad_weight, grad_bias, *grad_operands]


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

    Neither x nor the weight has to be there where the other needs no gradient.
    """
    rows = grad if grad.dim() == 2 else _rows(grad)
    grad_x = grad_weight = None
    if _grad_enabled() or not runs_directly(grad, x, weight):
        if needs_x:
            grad_x = _linear(grad, weight.t(), precision)
        if needs_weight:
            grad_weight = _linear(rows.t(), _rows(x).t(), precision)
    else:
        own = _own_products(grad, precision)
        if needs_x:
            grad_x = _mm(rows, weight) if own == _NO_PRODUCT else _times(rows, weight, precision, own)
            if rows is not grad:
                grad_x = torch_gemm.unflattened(grad_x, grad)
        if needs_weight:
            turned, columns = rows.t(), x if x.dim() == 2 else _rows(x)
            grad_weight = (
                _mm(turned, columns) if own == _NO_PRODUCT else _times(turned, columns, precision, own)
            )
    return [grad_x, grad_weight, rows.sum(0) if needs_bias else None]


def linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `linear_backward` needs."""
    # Arguments at the end that have their default value may be missing; strict is the forward call's alone.
    epilogue, x, weight, bias, operands, scalars, precision, *pack_and_strict = inputs
    pack = pack_and_strict[0] if pack_and_strict else packs.FIND
    call = (EPILOGUES[epilogue], scalars, precision, pack, False, False)
    _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    save_linear(ctx, call, x, weight, bias, operands, output, needs_x, needs_weight)


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::linear`, in the order of its arguments."""
    _, needs_x, needs_weight, needs_bias, needs_operands, *others = ctx.needs_input_grad
    needs = (needs_x, needs_weight, needs_bias, *needs_operands)
    grad_x, grad_weight, grad_bias, *grad_operands = linear_gradients(ctx, grad, needs)
    nothing = (None for _ in others[1:])  # for each argument after the scalars
    return None, grad_x, grad_weight, grad_bias, grad_operands, _none_like(ctx.call[1]), *nothing


def _derivative_of_scale(grad: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """grad times scale_batch_norm's derivative, which does not depend on the product."""
    if _grad_enabled() or not runs_directly(grad, *operands):
        return (grad.to(operands[0].dtype) * operands[0]).to(grad.dtype)
    return _derivative((SCALE_BATCH_NORM, ()), grad, grad, None, operands)


def elementwise_gradients(
    call: ElementwiseCall,
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients with respect to (x, bias, *operands), where `needs` asks for them; x's may come unasked."""
    if _grad_enabled() or True in needs[2:]:
        return _epilogue_gradients(call, x, bias, operands, grad, needs)
    found = _derivative(call, grad, x, bias, operands)
    return [found, _rows(found).sum(0) if needs[1] else None, *(None for _ in operands)]


def elementwise_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `elementwise_backward` needs."""
    epilogue, x, bias, operands, scalars = inputs
    ctx.call = (EPILOGUES[epilogue], scalars)
    ctx.save_for_backward(x, bias, *operands)


def elementwise_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::elementwise`, in the order of its arguments."""
    x, bias, *operands = ctx.saved_tensors
    _, needs_x, needs_bias, needs_operands, _ = ctx.needs_input_grad
    needs = (needs_x, needs_bias, *needs_operands)
    grad_x, grad_bias, *grad_operands = elementwise_gradients(ctx.call, grad, x, bias, operands, needs)
    return None, grad_x, grad_bias, grad_operands, _none_like(ctx.call[1])


def save_fold_batch_norm(ctx: Any, like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> None:
    """Save what `fold_batch_norm_gradients` needs."""
    bias, *others = vectors
    # Of `like`, which is all of x, nothing but the type and the device is read.
    ctx.save_for_backward(like.new_empty(()), bias, _snapshot(bias), *others)
    ctx.eps = eps


def fold_batch_norm_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients with respect to the vectors, where `needs` asks for them."""
    like, bias, snapshot, *others = ctx.saved_tensors
    vectors = [bias if _grad_enabled() else snapshot, *others]

    def fold(*tracked: Tensor | None) -> Tensor:
        return fold_batch_norm_reference(like, tracked, ctx.eps)

    return _gradients_of(fold, vectors, grad, needs)


def fold_batch_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `fold_batch_norm_backward` needs."""
    like, *vectors, eps = inputs
    save_fold_batch_norm(ctx, like, vectors, eps)


def fold_batch_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::fold_batch_norm`, in the order of its arguments."""
    return None, *fold_batch_norm_gradients(ctx, grad, ctx.needs_input_grad[1:-1]), None


def _derivative(
    call: ElementwiseCall, grad: Tensor, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor]
) -> Tensor:
    """grad times the epilogue's derivative at x."""
    if runs_directly(grad, x, bias, *operands) and execution.has_native_kernels(x):
        epilogue, scalars = call
        return execution.derivative(epilogue, grad, x, bias, operands, scalars)
    found = _epilogue_gradients(call, x, bias, operands, grad, (True, *[False] * (1 + len(operands))))
    assert found[0] is not None
    return found[0]


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or batches these tensors: a kernel may be launched on them."""
    if _is_compiling() or _functorch_interpreter() is not None or _dispatch_modes():
        return False
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            plain = kind is Tensor or kind is Parameter
            if not plain or _is_legacy_batched(tensor) or _is_functional(tensor):
                return False
    return True


def _epilogue_gradients(
    call: ElementwiseCall,
    acc: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the epilogue alone with respect to (acc, bias, *operands)."""
    epilogue, scalars = call

    def apply(acc: Any, bias: Tensor | None, *operands: Any) -> Tensor:
        return epilogue.reference(acc, bias, operands, scalars)

    return _gradients_of(apply, (acc, bias, *operands), grad, needs)


def _gradients_of(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of `function(*inputs)` with respect to the inputs that need one; None for the others."""
    gradients: list[Tensor | None] = [None] * len(inputs)
    wanted = [index for index, need in enumerate(needs) if need]
    if not wanted:
        return gradients
    create_graph = _grad_enabled()
    if _functorch_interpreter() is not None:  # where no tensor can be made to require a gradient

        def of_wanted(*values: Tensor) -> Tensor:
            given = dict(zip(wanted, values, strict=True))
            return function(*(given.get(index, tensor) for index, tensor in enumerate(inputs)))

        with torch.enable_grad():
            pullback: Any = torch.func.vjp(of_wanted, *(inputs[index] for index in wanted))[1]
            return _placed(gradients, wanted, pullback(grad))
    with torch.enable_grad():
        aliases = {index: _tracked(inputs[index]) for index in wanted}
        found = torch.autograd.grad(
            function(*(aliases.get(index, tensor) for index, tensor in enumerate(inputs))),
            list(aliases.values()),
            grad,
            create_graph=create_graph,
            materialize_grads=True,
        )
    return _placed(gradients, wanted, found)


def _placed(
    gradients: list[Tensor | None], wanted: Sequence[int], found: Sequence[Tensor]
) -> list[Tensor | None]:
    for index, gradient in zip(wanted, found, strict=True):
        gradients[index] = gradient
    return gradients


def _tracked(tensor: Tensor | None) -> Tensor:
    """An alias for autograd to follow: a tensor may be two arguments at once, and it may have a graph behind it."""
    assert tensor is not None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _snapshot(bias: Tensor | None) -> Tensor | None:
    """The values of a bias as they are: nothing that is written to it later changes them."""
    return None if bias is None else bias.detach().clone()


def _accumulator(x: Tensor, weight: Tensor, precision: str, pack: str) -> Tensor:
    """x @ weight.T as the forward's epilogue saw it.

    Rounded to 16 bits it could overflow where the forward did not, or carry a small sum with the bias across
    the kink of a relu.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return _product(x, weight, precision, pack)
    rows = _rows(x)
    if x.is_cuda and not _grad_enabled():
        acc = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:  # elsewhere there is no such product, and it has no derivative of its own
        acc = torch.mm(rows.float(), weight.float().t())
    return acc.reshape(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, precision: str, pack: str) -> Tensor:
    direct = not _grad_enabled() and runs_directly(x, weight)
    return (_product_at_once if direct else _linear)(x, weight, precision, pack)


def _product_at_once(x: Tensor, weight: Tensor, precision: str, pack: str) -> Tensor:
    """x @ weight.T, where nothing traces or differentiates this: the operator would take longer to get there."""
    if _any_autocast() or execution.on_first_call is not None or not plans.has_gpu_kernels(x):
        return execution.linear_forward(BIAS, x, weight, None, (), (), precision, pack_use=pack)
    return shortcut.linear(BIAS, x, weight, None, (), (), precision, pack)


def _linear(x: Tensor, weight: Tensor, precision: str, pack: str = packs.FIND) -> Tensor:
    """x @ weight.T by the operator, which is right under whatever traces or differentiates this."""
    product: Tensor = ops.linear(BIAS.name, x, weight, None, [], [], precision, pack)
    return product


def _own_products(rows: Tensor, precision: str) -> int:
    """Which products with `rows` are not simply torch's: `_NO_PRODUCT`, `_STRAIGHT_ONES` or `_EVERY_ONE`."""
    if _any_autocast() or execution.on_first_call is not None:
        return _EVERY_ONE
    if plans.has_gpu_kernels(rows):
        return _STRAIGHT_ONES if rows.element_size() == 2 else _EVERY_ONE
    if precision == _precision.DEFAULT or rows.dtype is not torch.float32:
        return _NO_PRODUCT
    return _EVERY_ONE if _precision.needs_override(precision, rows.device.type) else _NO_PRODUCT


def _times(rows: Tensor, matrix: Tensor, precision: str, own: int) -> Tensor:
    """rows @ matrix, where nothing traces or differentiates this; `own`: what `_own_products` says."""
    if own == _NO_PRODUCT or (own == _STRAIGHT_ONES and (rows.stride(1) != 1 or matrix.stride(0) != 1)):
        return _mm(rows, matrix)
    return _product_at_once(rows, matrix.t(), precision, packs.FIND)


def _rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    # Not `flatten`: `torch.autograd.grad(is_grads_batched=True)` knows no rule for it.
    return x.unsqueeze(0) if x.dim() == 1 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _none_like(scalars: Sequence[float]) -> list[None] | None:
    """The gradient of a float[] argument: autograd takes an empty list for a list of tensors."""
    return None if scalars else []
