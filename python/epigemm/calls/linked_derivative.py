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


def gradients(
    epilogue: LinkedEpilogue, call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Gradients with respect to (x, bias, *operands), by one kernel and sums; None if no kernel runs."""
    x = call.x
    if not x.is_cuda or x.dim() != 2 or x.numel() == 0 or grad.dtype != x.dtype:
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
        like: Any = {"dtype": dtype if kind == MATRIX else wide, "device": x.device}
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
        found[place] = KINDS[kind].summed(of_elements).to(dtype)
    return found
