"""The kernel of an epilogue alone that is made at run time, and that of its derivative: linked at the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import ElementwiseCall
from epigemm.epilogues.kinds import KINDS, MATRIX
from epigemm.epilogues.registry import Epilogue, compute_dtype
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.linking import loading


def elementwise(epilogue: LinkedEpilogue, call: ElementwiseCall) -> Tensor:
    """D = epilogue(x), for a matrix, into `call.out` or a new tensor."""
    x = call.x
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.is_cuda or x.numel() == 0 or loading.link(epilogue, missing_elementwise(epilogue, x), x.device):
        return out.copy_(epilogue.reference(x, call.bias, call.operands, call.scalars))
    target = out if _has_rows(out) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = [readable(operand) for operand in call.operands]
    ops._linked_elementwise_out(
        epilogue.name, readable(x), operands or None, list(call.scalars) or None, target
    )
    return target if target is out else out.copy_(target)


def gradients(
    epilogue: LinkedEpilogue, call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Gradients with respect to (x, bias, *operands), in one kernel and sums; None where no kernel runs."""
    x = call.x
    if not x.is_cuda or x.dim() != 2 or x.numel() == 0 or grad.dtype != x.dtype:
        return None
    given = epilogue.in_order(None, call.operands, call.scalars) or ()
    every = zip(epilogue.operands[1:], epilogue.traced.slots, epilogue.traced.reads, given, strict=True)
    tensors = [each for each in every if isinstance(each[3], Tensor)]
    for operand, *_, value in tensors:
        if not operand.folded and isinstance(value, Tensor):
            # Of a product that was made again in fp32, the gradient is a 16-bit one in fp32.
            grad = grad.to(value.dtype)
    if loading.link(epilogue, missing_elementwise(epilogue, grad, derivative=True), x.device):
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


def missing_elementwise(epilogue: Epilogue, x: Tensor, *, derivative: bool = False) -> str:
    """The elementwise kernel of such an x, or that of the derivative, unless it is linked already."""
    names: str = ops._missing_elementwise(epilogue.name, x, derivative)
    return names


def _has_rows(tensor: Tensor) -> bool:
    """Whether a matrix's rows have no gaps, which is how kernels read and write."""
    return tensor.stride(1) == 1 or tensor.shape[1] == 1


def readable(tensor: Tensor) -> Tensor:
    """A tensor as the kernels read it: matrices by rows, vectors without gaps."""
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        return tensor if _has_rows(tensor) else tensor.contiguous()
    if tensor.dim() == 0 or tensor.stride(0) == 1:
        return tensor
    # A single element is contiguous to torch whatever its stride says.
    return tensor.contiguous().as_strided(tensor.shape, (1,) * tensor.dim())
