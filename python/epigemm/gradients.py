"""Derivatives of the operators.

What is saved is what PyTorch's unfused operators would save, as far as the derivative can do with that: x only for the
weight's gradient and the weight only for that of x, so that either may be overwritten where it is not needed; of a relu
the result, whose sign is the derivative; before any other epilogue the product (`saves_product` says where, and
`registration.py` then makes one operator two). So first derivatives cost no further product, and no later write to a
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

from epigemm import entry, execution, packs
from epigemm._native import ops
from epigemm.epilogues import BIAS, BIAS_RELU, EPILOGUES, SCALE_BATCH_NORM, fold_batch_norm_reference

_PLAIN = (Tensor, torch.nn.Parameter)
_functorch = torch._C._functorch
_any_autocast = torch._C._is_any_autocast_enabled
_threshold_backward: Any = torch.ops.aten.threshold_backward


def without_product(epilogue: str, operands: Sequence[Tensor]) -> bool:
    """Whether the derivatives of `epigemm::linear` do without the product that the epilogue was applied to."""
    if epilogue == SCALE_BATCH_NORM.name:  # linear in the product: only the vectors' own gradients read it
        return not any(operand.requires_grad for operand in operands)
    return epilogue in (BIAS.name, BIAS_RELU.name)


def saves_product(epilogue: str, x: Tensor, operands: Sequence[Tensor], *, strict: bool) -> bool:
    """Whether a call of `epigemm::linear` that records gradients runs as two operators and saves what is between them.

    Saving the product takes one more pass over the result, computing it again a matrix product. Eager saves it, too;
    rounded to the tensors' dtype, as here. A strict call stays one kernel. So does one whose bias is folded into 16-bit
    numbers' epilogue: a product that is rounded to 16 bits before its bias is added loses what the two cancel to.
    """
    if strict or without_product(epilogue, operands):
        return False
    return not (epilogue == SCALE_BATCH_NORM.name and x.element_size() == 2)


def linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `linear_backward` needs."""
    # Arguments at the end that have their default value may be missing; strict is the forward call's alone.
    epilogue, x, weight, bias, operands, scalars, precision, *pack_and_strict = inputs
    _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.epilogue, ctx.scalars, ctx.precision = epilogue, scalars, precision
    ctx.pack = pack_and_strict[0] if pack_and_strict else packs.FIND
    ctx.dtype = x.dtype
    ctx.again = not without_product(epilogue, operands)
    ctx.save_for_backward(
        x if ctx.again or needs_weight else None,
        weight if ctx.again or needs_x else None,
        bias if ctx.again else None,
        _snapshot(bias) if ctx.again else None,
        output if epilogue == BIAS_RELU.name else None,
        *operands,
    )


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::linear`, in the order of its arguments."""
    x, weight, bias, snapshot, output, *operands = ctx.saved_tensors
    _, needs_x, needs_weight, needs_bias, needs_operands, *others = ctx.needs_input_grad
    needs_acc = needs_x or needs_weight
    grad_acc: Tensor | None
    grad_bias: Tensor | None
    grad_operands: list[Tensor | None] = [None] * len(operands)
    if ctx.again:
        acc = _accumulator(x, weight, ctx.precision, ctx.pack)
        bias = bias if torch.is_grad_enabled() else snapshot
        grad_acc, grad_bias, *grad_operands = _epilogue_gradients(
            ctx, acc, bias, operands, grad.to(acc.dtype), (needs_acc, needs_bias, *needs_operands)
        )
        grad_acc = None if grad_acc is None else grad_acc.to(ctx.dtype)
    else:
        found = _derivative_without_product(ctx, grad, output, operands)
        grad_acc, grad_bias = found, _sum_rows(found) if needs_bias else None
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


def _derivative_without_product(
    ctx: Any, grad: Tensor, output: Tensor | None, operands: Sequence[Tensor]
) -> Tensor:
    """grad times the epilogue's derivative, where that is known without what the epilogue was applied to."""
    if ctx.epilogue == BIAS.name:
        return grad
    if ctx.epilogue == BIAS_RELU.name:
        found: Tensor = _threshold_backward(grad, output, 0)
        return found
    if torch.is_grad_enabled() or not runs_directly(grad, *operands):
        return (grad.to(operands[0].dtype) * operands[0]).to(grad.dtype)
    return _derivative(ctx, grad, grad, None, operands)


def elementwise_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `elementwise_backward` needs."""
    epilogue, x, bias, operands, scalars = inputs
    ctx.save_for_backward(x, bias, *operands)
    ctx.epilogue, ctx.scalars = epilogue, scalars


def elementwise_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::elementwise`, in the order of its arguments."""
    x, bias, *operands = ctx.saved_tensors
    _, needs_x, needs_bias, needs_operands, _ = ctx.needs_input_grad
    if not torch.is_grad_enabled() and not any(needs_operands):
        found = _derivative(ctx, grad, x, bias, operands)
        sums = _sum_rows(found) if needs_bias else None
        return None, found, sums, [None] * len(operands), _none_like(ctx.scalars)
    grad_x, grad_bias, *grad_operands = _epilogue_gradients(
        ctx, x, bias, operands, grad, (needs_x, needs_bias, *needs_operands)
    )
    return None, grad_x, grad_bias, grad_operands, _none_like(ctx.scalars)


def fold_batch_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `fold_batch_norm_backward` needs."""
    like, bias, *vectors, eps = inputs
    # Of `like`, which is all of x, nothing but the type and the device is read.
    ctx.save_for_backward(like.new_empty(()), bias, _snapshot(bias), *vectors)
    ctx.eps = eps


def fold_batch_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::fold_batch_norm`, in the order of its arguments."""
    like, bias, snapshot, *others = ctx.saved_tensors
    vectors = [bias if torch.is_grad_enabled() else snapshot, *others]

    def fold(*tracked: Tensor | None) -> Tensor:
        return fold_batch_norm_reference(like, tracked, ctx.eps)

    return None, *_gradients_of(fold, vectors, grad, ctx.needs_input_grad[1:-1]), None


def _derivative(ctx: Any, grad: Tensor, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor]) -> Tensor:
    """grad times the epilogue's derivative at x."""
    if runs_directly(grad, x, bias, *operands) and execution.has_native_kernels(x):
        return execution.derivative(EPILOGUES[ctx.epilogue], grad, x, bias, operands, ctx.scalars)
    found = _epilogue_gradients(ctx, x, bias, operands, grad, (True, *[False] * (1 + len(operands))))
    assert found[0] is not None
    return found[0]


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or batches these tensors: a kernel may be launched on them."""
    if (
        torch.compiler.is_compiling()
        or _functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
    ):
        return False
    return all(
        tensor is None
        or (
            type(tensor) in _PLAIN
            and not _functorch.is_legacy_batchedtensor(tensor)
            and not torch._is_functional_tensor(tensor)
        )
        for tensor in tensors
    )


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
    if _functorch.peek_interpreter_stack() is not None:  # where no tensor can be made to require a gradient

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
    if x.is_cuda and not torch.is_grad_enabled():
        acc = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:  # elsewhere there is no such product, and it has no derivative of its own
        acc = torch.mm(rows.float(), weight.float().t())
    return acc.reshape(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, precision: str, pack: str = packs.FIND) -> Tensor:
    if torch.is_grad_enabled() or not runs_directly(x, weight):
        product: Tensor = ops.linear(BIAS.name, x, weight, None, [], [], precision, pack)
        return product
    # The operator would take longer to get there.
    transposed = x.stride(-1) != 1 or weight.stride(-1) != 1
    if transposed and x.dim() == 2 and x.element_size() == 2 and not _any_autocast():  # there is nothing else
        return torch.nn.functional.linear(x, weight)
    found = entry.linear_operator(BIAS, x, weight, None, (), (), precision, pack, False)
    if found is not None:
        return found
    return execution.linear_forward(BIAS, x, weight, None, (), (), precision, pack_use=pack)


def _rows(x: Tensor) -> Tensor:
    # Not `flatten`: `torch.autograd.grad(is_grads_batched=True)` knows no rule for it.
    return x.unsqueeze(0) if x.dim() == 1 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _sum_rows(grad: Tensor) -> Tensor:
    return _rows(grad).sum(0)


def _none_like(scalars: Sequence[float]) -> list[None] | None:
    """The gradient of a float[] argument: autograd takes an empty list for a list of tensors."""
    return None if scalars else []
