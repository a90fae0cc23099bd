"""Rows in groups where autograd records a call, and the rows of experts.

In fp32 the product and the gradient of x are by the kernels of calls: PyTorch's grouped product would copy the ends to
the host for both. The gradient of the weights is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments import checks
from epigemm.arguments.calls import ElementwiseCall, LinearCall, operator_arguments
from epigemm.autograd import nodes
from epigemm.calls import entry, groups, resolve
from epigemm.compilers import in_forward_mode, is_faked, is_traced, is_transformed
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import Epilogue, Operands
from epigemm.planner import plans
from epigemm.planner.reasons import Reason


def product(x: Tensor, weight: Tensor, ends: Tensor, *, is_recorded: bool) -> Tensor:
    """The rows of each group times its weight, as `groups.product`."""
    is_ours = is_recorded and _is_plain() and x.dtype is torch.float32 and x.shape[0] > 0
    if is_ours and plans.has_gpu_kernels(x):
        return recorded(x, weight, ends)
    return groups.product(x, weight, ends, is_recorded=is_recorded)


def with_gradient(matrix: Tensor, is_own: Tensor) -> Tensor:
    """The matrix, with the gradient of the rows that `is_own`, and 0 for the others: `torch.where` would copy it."""
    if not _is_plain():
        return torch.where(is_own, matrix, 0)
    result: Tensor = _WithGradient.apply(matrix, is_own)  # type: ignore[no-untyped-call]
    return result


def applied(epilogue: Epilogue, z: Tensor, operands: Operands) -> Tensor:
    """The epilogue on a product, as `Epilogue.reference`: by the kernels of elementwise calls, where they read it."""
    pairs = zip(epilogue.operands, operands, strict=True)
    tensors = [(KINDS[spec.kind], value) for spec, value in pairs if isinstance(value, Tensor)]
    is_read = all(kind.by_row or not (kind.by_column or value.dim()) for kind, value in tensors)
    if not (is_read and _is_plain()):
        return epilogue.reference(z, operands)
    whole = tuple(each.contiguous() if isinstance(each, Tensor) else each for each in operands)
    call = ElementwiseCall(epilogue, z.contiguous(), whole)
    if entry.sees(*call.inputs) is Reason.RECORDED:
        return nodes.record(call)
    result: Tensor = ops.elementwise(*operator_arguments(call))  # of a subclass, or under a mode
    return result


STEPS = groups.Steps(product, with_gradient, applied)


def by_expert(x: Tensor, order: Tensor, by_token: Tensor, chosen: int) -> Tensor:
    """Each token's row for each of its `chosen` experts, in `order`: of experts. `by_token` is its inverse.

    The gradient is `by_token_summed`, which reads each row once: that of an index sorts, and adds row by row.
    """
    return _moved(x, order, by_token, chosen, False)


def by_token_summed(rows: Tensor, order: Tensor, by_token: Tensor, chosen: int) -> Tensor:
    """The sum of each token's rows, which lie in the order of experts; its gradient is `by_expert`."""
    return _moved(rows, order, by_token, chosen, True)


def _moved(rows: Tensor, order: Tensor, by_token: Tensor, chosen: int, sums: bool) -> Tensor:
    if torch.is_grad_enabled() and _is_plain():
        result: Tensor = _Moved.apply(rows, order, by_token, chosen, sums)  # type: ignore[no-untyped-call]
        return result
    return rows[by_token].view(-1, chosen, rows.shape[1]).sum(1) if sums else rows[order // chosen]


def _is_plain() -> bool:
    return not (is_traced() or is_faked() or is_transformed() or in_forward_mode())


def recorded(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same with a node of autograd; `ends` do not fall."""
    result: Tensor = _Product.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return result


def _by_operators(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return groups.product(x, weight, ends, is_recorded=True)


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


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, is_own: Tensor) -> Tensor:
        ctx.save_for_backward(is_own)
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (is_own,) = ctx.saved_tensors
        return torch.where(is_own, grad, 0), None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, by_token: Tensor, chosen: int, sums: bool) -> Tensor:
        ctx.save_for_backward(order, by_token)
        ctx.about = chosen, sums
        return _moved(rows, order, by_token, chosen, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, by_token = ctx.saved_tensors
        chosen, sums = ctx.about
        return _moved(grad, order, by_token, chosen, not sums), None, None, None, None
