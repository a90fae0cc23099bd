"""Calls that autograd records: one node per layer, reached without the dispatcher.

`torch.library.register_autograd` works for every call, but takes the host hundreds of microseconds a layer, most of it
for nested arguments. Calls of plain tensors that nothing traces use these nodes instead, or PyTorch's own
(`linear_by_torch`). Both save the same tensors and run the same derivatives, those of `epigemm.autograd.gradients`.

`route` and `registration` check what this module assumes: some argument requires a gradient, gradients are enabled, and
every tensor is a plain one.
"""

from __future__ import annotations

import functools
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
from epigemm.calls import elementwise_kernels, entry, one_kernel, resolve
from epigemm.calls.log import current
from epigemm.epilogues.registry import Epilogue
from epigemm.packs import weight_packs
from epigemm.planner.reasons import Reason


def forward(call: LinearCall | ElementwiseCall) -> Tensor:
    """The operator `epigemm::linear` or `elementwise` below autograd."""
    if isinstance(call, LinearCall) and not call.uses_pack and current.log is None:
        weight_packs.expire(call.weight)
    found = entry.made(call)
    return found if isinstance(found, Tensor) else resolve.made(call)


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


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_relu": torch.relu,
    "bias_gelu": torch.nn.functional.gelu,
    "bias_gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "bias_silu": torch.nn.functional.silu,
}
"""Epilogues that are one operator of PyTorch's behind the product and its bias. Not one whose derivative reads its
result, as that of tanh: callers could not write it in place."""


def linear_by_torch(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
    """D of `OPERATORS` or the product alone, recorded by PyTorch's own operators (csrc/call/recorded.h says when)."""
    if current.log is not None:
        return current.log.made(linear_by_torch, epilogue, x, weight, bias)  # type: ignore[no-any-return]
    if weight.requires_grad:
        weight_packs.expire(weight)
    product = torch.nn.functional.linear(x, weight, bias)
    return product if epilogue.is_bias else OPERATORS[epilogue.name](product)


def fold_batch_norm(call: FoldCall) -> tuple[Tensor, ...]:
    """Multiplier and offset that the vectors fold into, recorded."""
    folded: tuple[Tensor, ...] = _fold_batch_norm(call, *call.vectors)
    return folded


def linear_with_product(call: LinearCall) -> tuple[Tensor, Tensor]:
    """The operator `epigemm::linear_with_product` below autograd: the result, and the product with its bias.

    Stored by one kernel, or by the first one of two.
    """
    found = one_kernel.both(call._replace(epilogue=call.epilogue.with_product), is_recorded=True)
    if isinstance(found, tuple):
        if not call.uses_pack and current.log is None:
            weight_packs.expire(call.weight)
        return found
    if found is not Reason.NOT_FUSED:
        # Before anything is launched: the two kernels' own checks would not fit the call as a whole.
        checks.arguments(call)
    product = forward(call.product())
    return forward(call.behind(product)), product


def _gradients_of_fold(
    ctx: Any, grad_multiplier: Tensor, needs: Sequence[bool], grad_offset: Tensor
) -> list[Tensor | None]:
    _, _, *vectors = ctx.saved_tensors  # the bias as it was saved
    if torch.is_grad_enabled() or not gradient_products.runs_directly(grad_multiplier, grad_offset, *vectors):
        return gradients.fold_batch_norm_gradients(ctx, torch.stack((grad_multiplier, grad_offset)), needs)
    return gradients.gradients_of_fold(grad_multiplier, grad_offset, vectors, ctx.eps, needs)


def node(name: str, forward: Callable[[Any], Any], save: Any, derivatives: Any) -> Callable[..., Any]:
    """A node for calls. `save` returns the result, of what the forward has made.

    The tensors of a call are separate arguments, because autograd must track them. The call object must not be saved.
    """

    def run(ctx: Any, call: Any, *inputs: Tensor | float | None) -> Any:
        return save(ctx, call, forward(call))

    def backward(ctx: Any, grad: Tensor | None, *more: Tensor | None) -> Gradients:
        return None, *derivatives(ctx, grad, ctx.needs_input_grad[1:], *more)

    members = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    node: Any = types.new_class(name, (Function,), {}, lambda space: space.update(members))
    found: Callable[..., Any] = super(Function, node).apply  # without its work for torch.func's transforms
    return found


_linear = node("_Linear", forward, gradients.save, gradients.linear_gradients)
recorded_with_product = node(
    "_LinearWithProduct", linear_with_product, gradients.save, gradients.linear_gradients
)
"""The result of a recorded call whose derivative reads the product, and that product."""
_elementwise = node("_Elementwise", forward, gradients.save, gradients.saved_elementwise_gradients)
# The values of a fold do not depend on those of x, so x is hidden from autograd.
_fold_batch_norm = node(
    "_FoldBatchNorm",
    lambda call: elementwise_kernels.fold_batch_norm(call).unbind(0),
    gradients.save_fold_batch_norm,
    _gradients_of_fold,
)
