"""The product of rows in groups where autograd records a call in fp32: by the kernels of calls, as the gradient of x.

PyTorch's grouped product would copy the ends to the host for both. The gradient of the weights is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.calls import groups, resolve
from epigemm.compilers import in_forward_mode, is_faked, is_traced, is_transformed
from epigemm.epilogues.library import BIAS
from epigemm.planner import plans


def product(x: Tensor, weight: Tensor, ends: Tensor, group: Tensor, *, is_recorded: bool) -> Tensor:
    """The rows of each group times its weight, as `groups.product`."""
    is_other = is_traced() or is_faked() or is_transformed() or in_forward_mode()
    if is_recorded and not is_other and x.dtype is torch.float32 and x.shape[0] and plans.has_gpu_kernels(x):
        return recorded(x, weight, ends)
    return groups.product(x, weight, ends, group, is_recorded=is_recorded)


def recorded(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same with a node of autograd; `ends` do not fall."""
    result: Tensor = _Product.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return result


def _by_operators(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return groups.product(x, weight, ends, groups.group_of(rows, ends), is_recorded=True)


class _Product(torch.autograd.Function):
    """Its derivatives are recorded, too. Rows behind the last end are undefined in all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return resolve.linear(LinearCall(BIAS, x, weight, (None,), uses_pack=False, group_ends=ends))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()  # that of a sum is one number
        # Of several gradients at once, which are no memory: by operators.
        times = recorded if checks.has_memory(grad) else _by_operators
        return (
            times(grad, weight.mT, ends) if of_x else None,
            groups.gradient_of_weights(grad, x, ends) if of_weight else None,
            None,
        )
