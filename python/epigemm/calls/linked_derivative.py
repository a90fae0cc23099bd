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
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.linking import loading

_MOST_ROWS = 2**31 - 1  # for which kernels can tell which row of a matrix each of them reads


def gradients(
    epilogue: LinkedEpilogue, call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Gradients with respect to (x, bias, *operands), by one kernel and sums; None if no kernel runs."""
    x = call.x
    if not x.is_cuda or x.dim() < 2 or x.numel() == 0 or grad.dtype != x.dtype:
        return None
    if not epilogue.traced.program.has_derivative:
        return None
    if x.dim() > 2:
        return _of_leading_axes(epilogue, call, grad, needs)
    if x.shape[0] > _MOST_ROWS and any(operand.shared for operand in epilogue.operands):
        return None
    given = epilogue.in_order(None, call.operands, call.scalars) or ()
    every = zip(epilogue.operands[1:], epilogue.traced.slots, epilogue.traced.reads, given, strict=True)
    tensors = [each for each in every if isinstance(each[3], Tensor)]
    for operand, *_, value in tensors:
        if not operand.folded and isinstance(value, Tensor):
            # The product was computed again in fp32 for a call in 16 bits: its gradient is given in fp32, too.
            grad = grad.to(value.dtype)
    if loading.link(epilogue, missing(epilogue, grad, derivative=True), x.device):
        return None
    wide = compute_dtype(x.dtype)
    found: list[Tensor | None] = [None] * (2 + len(call.operands))
    slots, outs = [], []
    places = {0: (MATRIX, -1, True, x.dtype)}
    for place, (operand, slot, is_read, _) in enumerate(tensors, 2):
        places[place] = operand.kind, slot, is_read, call.operands[place - 2].dtype
    wanted = {place: about for place, about in places.items() if needs[place]}
    for place, (kind, slot, is_read, dtype) in wanted.items():
        is_summed = kind != MATRIX or (place > 0 and call.operands[place - 2].shape[0] < x.shape[0])
        like: Any = {"dtype": wide if is_summed else dtype, "device": x.device}
        found[place] = torch.empty(x.shape, **like) if is_read else torch.zeros(x.shape, **like)
        if is_read:
            slots.append(slot)
            outs.append(found[place])
    operands = [readable(operand) for operand in call.operands] or None
    scalars = list(call.scalars) or None
    ops._linked_derivative_out(epilogue.name, readable(grad), readable(x), operands, scalars, slots, outs)
    for place, (kind, _, _, dtype) in wanted.items():
        of_elements = found[place]
        assert of_elements is not None
        rows = call.operands[place - 2].shape[0] if kind == MATRIX and place > 0 else x.shape[0]
        found[place] = KINDS[kind].summed(of_elements, rows).to(dtype)
    return found


def _of_leading_axes(
    epilogue: LinkedEpilogue, call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """The same for an x with leading axes, which become one."""
    flat = call._replace(x=_rows(call.x), operands=[_rows(operand) for operand in call.operands])
    found = gradients(epilogue, flat, _rows(grad), needs)
    if found is None:
        return None
    likes = (call.x, call.bias, *call.operands)
    return [
        each if each is None or like is None else each.reshape(like.shape)
        for each, like in zip(found, likes, strict=True)
    ]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor
