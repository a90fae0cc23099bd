"""Calls that autograd records: one node per layer, reached without the dispatcher.

`torch.library.register_autograd` works for every call, but takes the host hundreds of microseconds a layer, most of it
for nested arguments. Calls of plain tensors that nothing traces use these nodes instead, or PyTorch's own
(`linear_by_torch`). Both save the same tensors and run the same derivatives, those of `epigemm.autograd.gradients`.

`route` and `registration` check what this module assumes: some argument requires a gradient, gradients are enabled, and
every tensor is a plain one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from epigemm.arguments import checks
from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall
from epigemm.autograd import gradient_products, gradients
from epigemm.autograd.gradients import Gradients
from epigemm.calls import elementwise_kernels, entry, one_kernel, resolve, resolve_elementwise
from epigemm.calls.log import current
from epigemm.epilogues.registry import Epilogue
from epigemm.packs import weight_packs


def linear_forward(call: LinearCall) -> Tensor:
    """The operator `epigemm::linear` below autograd."""
    if not call.uses_pack and current.log is None:
        weight_packs.expire(call.weight)
    return resolve.run_linear(call)


def elementwise_forward(call: ElementwiseCall) -> Tensor:
    """The operator `epigemm::elementwise` below autograd."""
    found = entry.call_elementwise(call)
    return found if isinstance(found, Tensor) else resolve_elementwise.elementwise(call)


def record(call: LinearCall | ElementwiseCall) -> Tensor:
    """A call with a node of autograd."""
    result: Tensor
    if not isinstance(call, LinearCall):
        result = _elementwise(call, call.x, *call.operands)
        return result
    if current.log is not None:
        current.log.begin(call)
    if not gradients.keeps_product(call):
        result = _linear(call, call.x, call.weight, *call.operands)
        return result
    result, _ = recorded_with_product(call, call.x, call.weight, *call.operands)
    return result


def linear_by_torch(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """D = x @ weight.T + bias or its ReLU, recorded by PyTorch's own operators (csrc/call/recorded.h says when)."""
    if current.log is not None:
        return current.log.made(linear_by_torch, epilogue, x, weight, bias)  # type: ignore[no-any-return]
    if weight.requires_grad:
        weight_packs.expire(weight)
    product = torch.nn.functional.linear(x, weight, bias)
    return product if epilogue.is_bias else torch.relu(product)


def fold_batch_norm(call: FoldCall) -> tuple[Tensor, ...]:
    """Multiplier and offset that the vectors fold into, recorded."""
    folded: tuple[Tensor, ...] = _fold_batch_norm(call, *call.vectors)
    return folded


def linear_with_product(call: LinearCall) -> tuple[Tensor, Tensor]:
    """The operator `epigemm::linear_with_product` below autograd: the result, and the product with its bias.

    Stored by one kernel, or by the first one of two.
    """
    found = one_kernel.both(call._replace(epilogue=call.epilogue.with_product), is_recorded=True)
    if found is not None:
        if not call.uses_pack and current.log is None:
            weight_packs.expire(call.weight)
        return found
    # Checked before anything is launched: the two kernels' own checks would not fit the call as a whole.
    checks.arguments(call)
    product = linear_forward(call.product())
    return elementwise_forward(call.behind(product)), product


def save_with_product(ctx: Any, call: LinearCall, results: tuple[Tensor, Tensor]) -> None:
    """Save what `gradients_with_product` needs.

    The product is a second result, which is not returned to callers. As a result it belongs to the node, so that a
    derivative that uses it can be differentiated again.
    """
    result, product = results
    ctx.epilogue, ctx.precision = call.epilogue, call.precision
    _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    behind = call.epilogue.without_bias(call.operands)  # the product has the bias
    read = gradients.save_operands(ctx, behind, gradients.unread(call), result)
    weight = call.weight if needs_x else None
    ctx.save_for_backward(call.x if needs_weight else None, weight, product, *read)
    ctx.set_materialize_grads(False)


def gradients_with_product(
    ctx: Any, grad: Tensor | None, grad_product: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients with respect to (x, weight, *operands), where `needs` asks for them, of both results."""
    x, weight, product, *saved = ctx.saved_tensors
    epilogue = ctx.epilogue
    needs_x, needs_weight, *needs_operands = needs
    place = epilogue.bias_place - 1  # among the operands
    needs_bias = place >= 0 and needs_operands[place]
    needs_product = needs_x or needs_weight or needs_bias
    found: list[Tensor | None] = [None] * len(needs_operands)
    if grad is not None:
        applied = ElementwiseCall(epilogue, product, gradients.saved_operands(ctx, saved, grad))
        wanted = [
            need and (number != place or grad_product is None) for number, need in enumerate(needs_operands)
        ]
        of_product, *found = gradients.elementwise_gradients(applied, grad, (needs_product, *wanted))
        grad_product = _sum(of_product, grad_product)
    if grad_product is None or not needs_product:
        return [None, None, *found]
    return gradients.through_product(
        grad_product, x, weight, needs, found, epilogue.bias_place, ctx.precision
    )


def _gradients_of_fold(
    ctx: Any, grad_multiplier: Tensor, grad_offset: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    _, _, *vectors = ctx.saved_tensors  # the bias as it was saved
    if torch.is_grad_enabled() or not gradient_products.runs_directly(grad_multiplier, grad_offset, *vectors):
        return gradients.fold_batch_norm_gradients(ctx, torch.stack((grad_multiplier, grad_offset)), needs)
    return gradients.gradients_of_fold(grad_multiplier, grad_offset, vectors, ctx.eps, needs)


def _node(name: str, forward: Callable[[Any], Any], save: Any, derivatives: Any) -> Callable[..., Any]:
    """A node for calls.

    The tensors of a call are separate arguments, because autograd must track them. The call object must not be saved.
    """

    def run(ctx: Any, call: Any, *inputs: Tensor | float | None) -> Any:
        result = forward(call)
        save(ctx, call, result)
        return result

    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        return None, *derivatives(ctx, *grads, ctx.needs_input_grad[1:])

    members = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    node: Any = types.new_class(name, (Function,), {}, lambda space: space.update(members))
    found: Callable[..., Any] = super(Function, node).apply  # without its work for torch.func's transforms
    return found


_linear = _node("_Linear", linear_forward, gradients.save_linear, gradients.linear_gradients)
recorded_with_product = _node(
    "_LinearWithProduct", linear_with_product, save_with_product, gradients_with_product
)
"""The result of a recorded call whose derivative reads the product, and that product."""
_elementwise = _node(
    "_Elementwise", elementwise_forward, gradients.save_elementwise, gradients.saved_elementwise_gradients
)
# The values of a fold do not depend on those of x, so x is hidden from autograd.
_fold_batch_norm = _node(
    "_FoldBatchNorm",
    lambda call: elementwise_kernels.fold_batch_norm(call).unbind(0),
    gradients.save_fold_batch_norm,
    _gradients_of_fold,
)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
