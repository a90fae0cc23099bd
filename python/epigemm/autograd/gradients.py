"""Derivatives of the operators.

A call saves what PyTorch's operators would save. x is saved only if the weight needs a gradient, and the weight only
if x does, so that either may be overwritten otherwise. Of a relu the result is saved, whose sign gives the derivative.
For other epilogues the product is saved (`keeps_product` says when): one kernel stores it beside the result, or the
call is two kernels. So first derivatives need no further product, and later writes to a bias do not matter. They are
one kernel for the epilogue's derivative, made of the functors themselves (csrc/epilogue/dual.h), then the products for
x and the weight. On a GPU that kernel also sums the columns for the bias, where they are whole vectors. Of vectors that
are folded all are saved if one has a gradient: writing one in place before the backward pass is then an error, as for
all that torch has saved.

A strict call stays one kernel, and so does a call in 16 bits whose bias is folded into its epilogue. Their derivatives
compute the product again, with a copy of the bias. Second derivatives run the registry's differentiable reference under
autograd. So do first derivatives that are traced: a compiler fuses their pointwise operations with others. The matrix
products are those of `epigemm.autograd.gradient_products`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall, tensors_of
from epigemm.autograd.gradient_products import accumulator, product_gradients, rows_of, runs_directly
from epigemm.calls import derivative
from epigemm.epilogues.library import BIAS_RELU, SCALE_BATCH_NORM
from epigemm.epilogues.registry import Epilogue, Operands, fold_batch_norm_reference

_grad_enabled = torch.is_grad_enabled
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_threshold_backward: Any = torch.ops.aten.threshold_backward.default

Gradients = tuple[Tensor | None, ...]


def unread(call: LinearCall | ElementwiseCall) -> frozenset[int]:
    """The places of a call's operands that no derivative by what learns depends on; 0: nor on the accumulator.

    Of a call that is not recorded: by anything.
    """
    learns = [call.x.requires_grad or (isinstance(call, LinearCall) and call.weight.requires_grad)]
    for each in call.operands:
        learns.append(isinstance(each, Tensor) and each.requires_grad)
    return call.epilogue.unread(tuple(learns) if any(learns) else (True,) * len(learns))


def without_product(call: LinearCall) -> bool:
    """Whether the derivatives of `epigemm::linear` need no product: the one that the epilogue was applied to."""
    if call.epilogue is SCALE_BATCH_NORM:  # linear in the product: only the vectors' own gradients read it
        return not any(operand.requires_grad for operand in tensors_of(call.operands))
    return call.epilogue.is_bias_relu or 0 in unread(call)


def keeps_product(call: LinearCall) -> bool:
    """Whether a recorded linear call also gives the product, which its derivative reads.

    Saving it costs one more pass over the result; computing it again costs a matrix product. Eager PyTorch saves it,
    too, also rounded to the tensors' dtype. A strict call stays one kernel. So does a call in 16 bits whose bias is
    folded into the epilogue: product and bias may cancel, and a product that is rounded to 16 bits before its bias is
    added would lose the difference.
    """
    return not (
        without_product(call)
        or call.strict
        or (call.epilogue is SCALE_BATCH_NORM and call.x.element_size() == 2)
    )


def save_operands(
    ctx: Any, operands: Operands, not_read: frozenset[int], result: Tensor
) -> list[Tensor | None]:
    """The tensors to save of a call's operands; what is no tensor is kept beside them.

    Of those that no derivative depends on, only the size: None for that of the result, in place of which the gradient
    may stand.
    """
    ctx.kept = []
    saved: list[Tensor | None] = []
    for place, operand in enumerate(operands, 1):
        ctx.kept.append(_SAVED if isinstance(operand, Tensor) else operand)
        if not isinstance(operand, Tensor):
            continue
        if place not in not_read:
            saved.append(operand)
        elif operand.shape == result.shape and operand.dtype == result.dtype:
            saved.append(None)
        else:
            saved.append(operand.new_empty(()).expand(operand.shape))
    return saved


def saved_operands(ctx: Any, saved: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | float | None]:
    """A call's operands from what `save_operands` kept and `saved`."""
    tensors = iter([_unread(grad) if each is None else each for each in saved])
    return [next(tensors) if each is _SAVED else each for each in ctx.kept]


_SAVED = object()


def _unread(grad: Tensor) -> Tensor:
    """Of the gradient's shape and type, in place of what no derivative reads: the gradient, where kernels take it.

    Any numbers do. A batch of gradients, which `is_grads_batched` passes, could not be made to require a gradient.
    """
    if not _grad_enabled() and runs_directly(grad):
        return grad
    return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)


def save(ctx: Any, call: LinearCall | ElementwiseCall, result: Any) -> Any:
    """Save what the derivatives of a call need; gives its result. A pair of results is the call's, and the product.

    That is a second result, which is not returned to callers. As a result it belongs to the node, so that a derivative
    that uses it can be differentiated again.
    """
    epilogue, operands, not_read, returned = call.epilogue, call.operands, unread(call), result
    # The last: what the epilogue was applied to, if its derivative reads that.
    x = weight = snapshot = matrix = None
    precision, again = None, False  # of an elementwise call
    if isinstance(call, LinearCall):
        precision = call.precision
        if not isinstance(result, Tensor):
            result, matrix = result
            ctx.set_materialize_grads(False)
        elif epilogue.is_bias_relu:
            matrix = result  # whose sign tells where the relu has cut, as that of its argument does
        else:
            again = not without_product(call)
        if again:
            x, weight, snapshot = call.x, call.weight, _snapshot(call.bias)
        else:  # the bias's gradient is that of the product, summed
            _, needs_x, needs_weight, *_ = ctx.needs_input_grad
            x, weight = call.x if needs_weight else None, call.weight if needs_x else None
            operands = epilogue.without_bias(operands)
    elif 0 not in not_read:
        matrix = call.x
    saved = save_operands(ctx, operands, not_read, result)
    ctx.call = (epilogue, precision, again)  # no tensor here: autograd would not see it
    ctx.save_for_backward(x, weight, snapshot, matrix, *saved)
    return returned


def linear_gradients(
    ctx: Any, grad: Tensor | None, needs: Sequence[bool], grad_product: Tensor | None = None
) -> list[Tensor | None]:
    """Gradients with respect to (x, weight, *operands), where `needs` asks for them, of the result and the product."""
    epilogue, precision, again = ctx.call
    x, weight, snapshot, matrix, *saved = ctx.saved_tensors
    if again:
        assert grad is not None
        return _gradients_by_product(ctx, grad, needs, (x, weight, snapshot, *saved))
    needs_x, needs_weight, *needs_operands = needs
    place = epilogue.bias_place - 1  # among the operands
    found: list[Tensor | None] = [None] * len(needs_operands)
    of_product = grad
    if grad is None:
        pass
    elif epilogue.is_bias_relu:
        both = None
        if needs_operands[0] and not _grad_enabled():
            both = derivative.of_x_and_sums(ElementwiseCall(BIAS_RELU, matrix), grad)
        of_product, found[0] = both or (_threshold_backward(grad, matrix, 0), None)
    elif not epilogue.is_bias:
        has_own = matrix is not None and grad_product is None  # whether the bias's is asked for here
        wanted = [need and (number != place or has_own) for number, need in enumerate(needs_operands)]
        needs_product = needs_x or needs_weight or (place >= 0 and needs_operands[place])
        given = saved_operands(ctx, saved, grad)
        applied = ElementwiseCall(epilogue, _unread(grad) if matrix is None else matrix, given)
        of_product, *found = elementwise_gradients(applied, grad, (needs_product, *wanted))
    of_both = [each for each in (of_product, grad_product) if each is not None]
    if not of_both:
        return [None, None, *found]
    needs_bias = place >= 0 and needs_operands[place] and found[place] is None
    of_product = sum(of_both[1:], of_both[0])
    through = product_gradients(of_product, x, weight, needs_x, needs_weight, needs_bias, precision)
    if needs_bias:
        found[place] = through[2]
    return [*through[:2], *found]


def _gradients_by_product(
    ctx: Any, grad: Tensor, needs: Sequence[bool], tensors: Sequence[Any]
) -> list[Tensor | None]:
    """As `linear_gradients`, if the product has to be computed again."""
    x, weight, snapshot, *saved = tensors
    epilogue, precision, _ = ctx.call
    operands = saved_operands(ctx, saved, grad)
    if epilogue.bias_place and not _grad_enabled():
        operands[epilogue.bias_place - 1] = snapshot
    needs_x, needs_weight, *needs_operands = needs
    acc = accumulator(x, weight, precision)
    found, *of_operands = _epilogue_gradients(
        ElementwiseCall(epilogue, acc, operands),
        grad.to(acc.dtype),
        (needs_x or needs_weight, *needs_operands),
    )
    if found is None:
        return [None, None, *of_operands]
    of_product = found.to(grad.dtype)
    through = product_gradients(of_product, x, weight, needs_x, needs_weight, False, precision)
    return [*through[:2], *of_operands]


def backward(ctx: Any, grad: Tensor | None, grad_product: Tensor | None = None) -> tuple[Any, ...]:
    """Gradients of `epigemm::linear`, `linear_with_product` or `elementwise`, in the order of its arguments."""
    epilogue, precision, _ = ctx.call
    _, *needs = ctx.needs_input_grad
    is_linear = precision is not None
    count = 2 if is_linear else 1  # of the matrices: x and the weight
    of_matrices, (of_bias, of_tensors, _, *others) = needs[:count], needs[count:]
    wanted = (*of_matrices, *_in_order(ctx, epilogue, of_bias, of_tensors))
    found = (
        linear_gradients(ctx, grad, wanted, grad_product)
        if is_linear
        else saved_elementwise_gradients(ctx, grad, wanted)  # type: ignore[arg-type]
    )
    return None, *found[:count], *_apart(ctx, epilogue, found[count:]), *(None for _ in others)


def _in_order(ctx: Any, epilogue: Epilogue, needs_bias: bool, needs_tensors: Sequence[bool]) -> list[bool]:
    """Which operands need a gradient, from the operator's arguments."""
    tensors = iter(needs_tensors)
    places = enumerate(ctx.kept, 1)
    return [
        needs_bias if place == epilogue.bias_place else each is _SAVED and next(tensors)
        for place, each in places
    ]


def _apart(ctx: Any, epilogue: Epilogue, found: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
    """The gradients of the operator's bias, tensors and numbers.

    Of a float[] argument: autograd takes an empty list for a list of tensors.
    """
    places = [*enumerate(ctx.kept, 1)]
    has_numbers = any(isinstance(each, (int, float)) for each in ctx.kept)
    tensors = [found[at - 1] for at, each in places if each is _SAVED and at != epilogue.bias_place]
    bias = found[epilogue.bias_place - 1] if epilogue.bias_place else None
    return bias, tensors, None if has_numbers else []


def elementwise_gradients(call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients with respect to (x, *operands), where `needs` is true; that of x may be computed without."""
    place = call.epilogue.bias_place
    if _grad_enabled() or any(need and number != place for number, need in enumerate(needs) if number):
        return _epilogue_gradients(call, grad, needs)
    found: list[Tensor | None] = [None] * len(needs)
    needs_bias = place > 0 and needs[place]
    if needs_bias and (summed := derivative.of_x_and_sums(call, grad)) is not None:
        found[0], found[place] = summed
        return found
    of_x = derivative.of_x(call, grad)
    if of_x is None:
        of_x, *_ = _epilogue_gradients(call, grad, (True, *[False] * len(call.operands)))
    found[0] = of_x
    if needs_bias and of_x is not None:
        found[place] = rows_of(of_x).sum(0)
    return found


def saved_elementwise_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """`elementwise_gradients` of the call that was saved."""
    _, _, _, x, *saved = ctx.saved_tensors
    operands = saved_operands(ctx, saved, grad)
    call = ElementwiseCall(ctx.call[0], _unread(grad) if x is None else x, operands)
    return elementwise_gradients(call, grad, needs)


def save_fold_batch_norm(ctx: Any, call: FoldCall, output: Any) -> Any:
    """Save what `fold_batch_norm_gradients` needs."""
    bias, *others = call.vectors
    # `like` is x. Only its type and its device are read.
    ctx.save_for_backward(call.like.new_empty(()), bias, _snapshot(bias), *others)
    ctx.eps = call.eps
    return output


def fold_batch_norm_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients with respect to the vectors, where `needs` asks for them."""
    like, bias, snapshot, *others = ctx.saved_tensors
    vectors = [bias if _grad_enabled() else snapshot, *others]

    def fold(*tracked: Tensor | None) -> Tensor:
        return fold_batch_norm_reference(like, tracked, ctx.eps)

    return gradients_of(fold, vectors, grad, needs)


def gradients_of_fold(
    grad_multiplier: Tensor,
    grad_offset: Tensor,
    vectors: Sequence[Tensor | None],
    eps: float,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """As `fold_batch_norm_gradients`, if nothing traces or differentiates this.

    The formulas are written out: autograd over the reference would launch several times as many kernels.

    multiplier = scale * gain and offset = (bias * scale - mean) * gain + bn_bias, gain = bn_weight / sqrt(var + eps).
    """
    wide = torch.float32 if grad_offset.device.type == "mps" else torch.float64  # as the reference
    of_multiplier, of_offset = grad_multiplier.to(wide), grad_offset.to(wide)
    bias, scale, mean, variance, bn_weight, _ = [None if v is None else v.to(wide) for v in vectors]
    needs_bias, needs_scale, needs_mean, needs_variance, needs_bn_weight, needs_bn_bias = needs
    inverse = None if variance is None else torch.rsqrt(variance + eps)
    found: list[Tensor | None] = [None] * len(vectors)
    if needs_bias:
        found[0] = _product_of(of_offset, scale, bn_weight, inverse)
    if needs_scale:
        shifted = of_multiplier if bias is None else of_multiplier + of_offset * bias
        found[1] = _product_of(shifted, bn_weight, inverse)
    if needs_mean:
        found[2] = _product_of(of_offset, bn_weight, inverse).neg()
    if needs_variance or needs_bn_weight:
        of_gain = _product_of(of_multiplier, scale)
        if bias is not None:
            of_gain = of_gain + _product_of(of_offset, bias, scale)
        if mean is not None:
            of_gain = of_gain - of_offset * mean
        if needs_variance:
            found[3] = -0.5 * _product_of(of_gain, bn_weight, inverse, inverse, inverse)
        if needs_bn_weight:
            found[4] = _product_of(of_gain, inverse)
    if needs_bn_bias:
        found[5] = of_offset
    return [
        gradient if gradient is None or vector is None else gradient.to(vector.dtype)
        for gradient, vector in zip(found, vectors, strict=True)
    ]


def _product_of(first: Tensor, *others: Tensor | None) -> Tensor:
    for other in others:
        if other is not None:
            first = first * other
    return first


def fold_batch_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of `epigemm::fold_batch_norm`, in the order of its arguments."""
    return None, *fold_batch_norm_gradients(ctx, grad, ctx.needs_input_grad[1:-1]), None


def _epilogue_gradients(call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of the epilogue alone with respect to (x, *operands)."""
    epilogue, x, operands, _ = call
    if not _grad_enabled() and runs_directly(grad, *call.inputs):
        if epilogue is SCALE_BATCH_NORM and any(needs[1:]):
            return _gradients_of_scale(x, tensors_of(operands)[0], grad, needs)
        found = derivative.gradients(call, grad, needs)
        if found is not None:
            return found
    places = [place for place, each in enumerate(operands) if isinstance(each, Tensor)]

    def apply(acc: Any, *tensors: Any) -> Tensor:
        given = [*operands]
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return epilogue.reference(acc, given)

    needs_of_tensors = (needs[0], *(needs[1 + place] for place in places))
    of_x, *of_tensors = gradients_of(apply, call.inputs, grad, needs_of_tensors)
    every: list[Tensor | None] = [None] * len(operands)
    for place, gradient in zip(places, of_tensors, strict=True):
        every[place] = gradient
    return [of_x, *every]


def _gradients_of_scale(
    acc: Tensor, multiplier: Tensor, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The derivative of scale_batch_norm's reference, written out, with respect to (acc, multiplier, offset)."""
    needs_acc, needs_multiplier, needs_offset = needs
    wide = grad.to(multiplier.dtype)
    return [
        (wide * multiplier).to(acc.dtype) if needs_acc else None,
        rows_of(wide * acc.to(wide.dtype)).sum(0) if needs_multiplier else None,
        rows_of(wide).sum(0) if needs_offset else None,
    ]


def gradients_of(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of `function(*inputs)` with respect to the inputs that need one; None for the others."""
    gradients: list[Tensor | None] = [None] * len(inputs)
    wanted = [index for index, need in enumerate(needs) if need]
    if not wanted:
        return gradients
    create_graph = _grad_enabled()
    if _functorch_interpreter() is not None:  # where tensors cannot be made to require gradients

        def of_wanted(*values: Tensor) -> Tensor:
            given = dict(zip(wanted, values, strict=True))
            return function(*(given.get(index, tensor) for index, tensor in enumerate(inputs)))

        with torch.enable_grad():
            pullback: Any = torch.func.vjp(of_wanted, *(inputs[index] for index in wanted))[1]
            found = pullback(grad)
    else:
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
    """An alias for autograd: the tensor itself may be two arguments at once, and may have a graph."""
    assert tensor is not None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _snapshot(bias: Tensor | None) -> Tensor | None:
    """A copy of a bias, which later writes to the bias do not change."""
    return None if bias is None else bias.detach().clone()
