"""The derivative of an epilogue that is made at run time: one kernel, linked at the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls.elementwise_kernels import missing
from epigemm.calls.layouts import readable
from epigemm.epilogues.kinds import KINDS, MATRIX
from epigemm.epilogues.registry import compute_dtype
from epigemm.linker import loader

_MOST_ROWS = 2**31 - 1  # for which kernels can tell which row of a matrix each of them reads


def gradients(call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None] | None:
    """Gradients with respect to (x, *operands), by one kernel and sums; None if no kernel runs."""
    epilogue, x, operands, _ = call
    if not x.is_cuda or x.dim() < 2 or x.numel() == 0 or grad.dtype != x.dtype:
        return None
    if not epilogue.traced.program.has_derivative:
        return None
    if x.dim() > 2:
        return _of_leading_axes(call, grad, needs)
    if x.shape[0] > _MOST_ROWS and any(operand.shared for operand in epilogue.operands):
        return None
    for operand, value in zip(epilogue.operands, operands, strict=True):
        if not operand.folded and isinstance(value, Tensor):
            # The product was computed again in fp32 for a call in 16 bits: its gradient is given in fp32, too.
            grad = grad.to(value.dtype)
    if loader.link(epilogue, missing(epilogue, grad, derivative=True), x.device):
        return None
    wide = compute_dtype(x.dtype)
    found: list[Tensor | None] = [None] * (1 + len(operands))
    slots, outs = [], []
    every = zip((x, *operands), (-1, *epilogue.traced.slots), (True, *epilogue.traced.reads), strict=True)
    wanted = [place for place, is_needed in enumerate(needs) if is_needed]
    for place, (value, slot, is_read) in enumerate(every):
        if place not in wanted or not isinstance(value, Tensor):
            continue
        is_summed = place > 0 and not _is_whole(epilogue.operands[place - 1].kind, value, x)
        like: Any = {"dtype": wide if is_summed else value.dtype, "device": x.device}
        found[place] = torch.empty(x.shape, **like) if is_read else torch.zeros(x.shape, **like)
        if is_read:
            slots.append(slot)
            outs.append(found[place])
    bias, tensors, scalars = epilogue.apart(operands)
    given = (None if bias is None else readable(bias), [*map(readable, tensors)] or None, scalars or None)
    ops._linked_derivative_out(epilogue.name, readable(grad), readable(x), *given, slots, outs)
    for place in wanted:
        of_elements, value = found[place], (x, *operands)[place]
        if place == 0 or of_elements is None or not isinstance(value, Tensor):
            continue
        kind = epilogue.operands[place - 1].kind
        rows = value.shape[0] if kind == MATRIX else x.shape[0]
        found[place] = KINDS[kind].summed(of_elements, rows).to(value.dtype)
    return found


def _is_whole(kind: str, value: Tensor, x: Tensor) -> bool:
    """Whether an operand has a number for each of x's."""
    return kind == MATRIX and value.shape[0] == x.shape[0]


def _of_leading_axes(
    call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """The same for an x with leading axes, which become one."""
    flat = [_rows(each) if isinstance(each, Tensor) else each for each in call.operands]
    found = gradients(call._replace(x=_rows(call.x), operands=flat), _rows(grad), needs)
    if found is None:
        return None
    return [
        each.reshape(like.shape) if isinstance(each, Tensor) and isinstance(like, Tensor) else each
        for each, like in zip(found, (call.x, *call.operands), strict=True)
    ]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor
