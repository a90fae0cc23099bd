"""Rules for batches of calls: `torch.vmap`, and `torch.autograd.grad(is_grads_batched=True)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.library import named

_BEFORE_X_SCALE = 10  # arguments of `linear`


def linear_batched(call: LinearCall) -> Tensor:
    """For `torch.autograd.grad(is_grads_batched=True)`, whose batches support only torch's own operators."""
    x, weight = call.x, call.weight
    with _precision.switched(x.device.type, _precision.IEEE) if call.order.overrides else nullcontext():
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        product = unflattened(torch.mm(rows, weight.t()), (*x.shape[:-1], weight.shape[0]))
    return call.epilogue.reference(product, call.operands)


def vmap_rule(op: Any) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of `linear` and `elementwise`. If only x is batched, the batch is one more leading dimension."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Tensor, int]:
        name, x, *others = args
        epilogue = named(name)
        has_rows = epilogue is not None and any(KINDS[operand.kind].by_row for operand in epilogue.operands)
        has_rows = has_rows or len(args) > _BEFORE_X_SCALE  # which may have a number for each row
        if in_dims[1] is not None and x.dim() > 1 and not has_rows and not _any_batched(in_dims[2:]):
            return op(name, x.movedim(in_dims[1], 0), *others), 0
        return _one_by_one(op, info, in_dims, args)

    return rule


def fold_batch_norm_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Tensor, int | None]:
    """The vmap rule of `fold_batch_norm`, which does not read the values of `like`."""
    if not _any_batched(in_dims[1:]):
        return ops.fold_batch_norm(*args), None
    return _one_by_one(ops.fold_batch_norm, info, (None, *in_dims[1:]), args)


def linear_in_blocks_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    """The vmap rule of `linear_in_blocks`, which has two results."""
    both = [
        _one_by_one(lambda *each, i=i: ops.linear_in_blocks(*each)[i], info, in_dims, args) for i in (0, 1)
    ]
    return tuple(zip(*both, strict=True))  # type: ignore[return-value]


def _one_by_one(op: Any, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Tensor, int]:
    if info.batch_size == 0:  # the shape, and gradients of zero, are those of a call of zeros
        return op(*_select(args, in_dims, None)).unsqueeze(0)[:0], 0
    return torch.stack([op(*_select(args, in_dims, index)) for index in range(info.batch_size)]), 0


def _any_batched(in_dims: Any) -> bool:
    return any(_any_batched(dim) if isinstance(dim, (list, tuple)) else dim is not None for dim in in_dims)


def _select(args: Sequence[Any], in_dims: Sequence[Any], index: int | None) -> list[Any]:
    """The arguments of one call of a batch; None: of an empty one, the sums of its nothing."""

    def pick(arg: Any, dim: Any) -> Any:
        if isinstance(dim, (list, tuple)):
            return [pick(a, d) for a, d in zip(arg, dim, strict=True)]
        if dim is None:
            return arg
        return arg.sum(dim) if index is None else arg.select(dim, index)

    return [pick(arg, dim) for arg, dim in zip(args, in_dims, strict=True)]
