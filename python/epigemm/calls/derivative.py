"""The derivatives of epilogues on GPUs: one kernel, which is linked at the first call if the package has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import elementwise_kernels, entry
from epigemm.calls.layouts import readable
from epigemm.epilogues.kinds import KINDS, MATRIX
from epigemm.epilogues.registry import compute_dtype
from epigemm.linker import loader
from epigemm.planner.reasons import Reason

_derivative_out = operator("_derivative_out")


def of_x(call: ElementwiseCall, grad: Tensor) -> Tensor | None:
    """grad times the epilogue's derivative at x, by one kernel; None if none runs."""
    found = _made(entry.derivative, call, grad, None)
    return found if isinstance(found, Tensor) else None


def of_x_and_sums(call: ElementwiseCall, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same and the sums of its columns, by one kernel; None if none gives both."""
    sums = _sums(call, grad)
    found = None if sums is None else _made(entry.derivative, call, grad, sums)
    return (found, sums) if isinstance(found, Tensor) and sums is not None else None


def gradients(call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None] | None:
    """Gradients with respect to (x, *operands), by one kernel, which sums the columns for a bias, and sums.

    None if no kernel runs.
    """
    epilogue, x, operands, _ = call
    if not x.is_cuda or x.dim() == 0 or x.numel() == 0 or grad.dtype != x.dtype:
        return None
    for operand, value in zip(epilogue.operands, operands, strict=True):
        if not operand.folded and isinstance(value, Tensor):
            # The product was computed again in fp32 for a call in 16 bits: its gradient is given in fp32, too.
            grad = grad.to(value.dtype)
    wide = compute_dtype(x.dtype)
    bias = epilogue.bias_place if epilogue.bias_place and needs[epilogue.bias_place] else 0
    found: list[Tensor | None] = [None] * (1 + len(operands))
    slots, outs = [], []
    every = zip((x, *operands), (-1, *epilogue.traced.slots), (True, *epilogue.traced.reads), strict=True)
    wanted = [place for place, is_needed in enumerate(needs) if is_needed and (place == 0 or place != bias)]
    for place, (value, slot, is_read) in enumerate(every):
        if place not in (*wanted, 0 if bias else None) or not isinstance(value, Tensor):
            continue
        is_whole = place == 0 or (epilogue.operands[place - 1].kind == MATRIX and value.numel() == x.numel())
        like: Any = {"dtype": value.dtype if is_whole else wide, "device": x.device}
        found[place] = torch.empty(x.shape, **like) if is_read else torch.zeros(x.shape, **like)
        if is_read and place > 0:
            slots.append(slot)
            outs.append(found[place])

    def run(call: ElementwiseCall, grad: Tensor, sums: Tensor | None) -> Reason | None:
        of_bias, tensors, scalars = epilogue.apart(call.operands)
        given = (of_bias, tensors or None, scalars or None)
        reason = _derivative_out(epilogue.name, grad, call.x, *given, found[0], sums, slots, outs)
        return Reason(reason) if reason else None

    # The package's own kernels sum the columns beside no other gradient.
    sums = None if not bias or (epilogue.is_compiled and slots) else _sums(call, grad)
    reason = Reason.NOT_READABLE if sums is None else _made(run, call, grad, sums)
    if reason is Reason.NOT_READABLE:
        sums, reason = None, _made(run, call, grad, None)
    if reason is not None:
        return None
    columns = x.shape[-1]
    for place in wanted:
        of_elements, value = found[place], (x, *operands)[place]
        if place == 0 or of_elements is None or not isinstance(value, Tensor):
            continue
        kind = epilogue.operands[place - 1].kind
        rows = value.numel() // columns if kind == MATRIX else x.numel() // columns
        summed = KINDS[kind].summed(of_elements.reshape(-1, columns), rows)
        found[place] = summed.to(value.dtype).reshape(value.shape)
    if bias and found[0] is not None:
        of_bias = found[0].reshape(-1, columns).sum(0) if sums is None else sums
        found[bias] = of_bias.to(grad.dtype)
    return found


def _sums(call: ElementwiseCall, grad: Tensor) -> Tensor | None:
    """For the sums of the columns of x's gradient; None where no kernel makes them.

    Of a grad with gaps a copy would take longer than the sum apart: of an expanded one PyTorch reads one number.
    """
    x = call.x
    columns = x.shape[-1] if x.dim() else 0
    if not elementwise_kernels.sums_columns(x, columns) or not grad.is_contiguous():
        return None
    return torch.empty(columns, dtype=x.dtype, device=x.device)


def _made(run: Callable[..., Any], call: ElementwiseCall, grad: Tensor, sums: Tensor | None) -> Any:
    """What `run` gives once the kernel is linked, and its tensors are copied if it cannot read them; or the reason."""
    epilogue = call.epilogue
    if not elementwise_kernels.has_native(call.x) or not epilogue.traced.program.has_derivative:
        return Reason.BY_REFERENCE
    result = run(call, grad, sums)
    if result is Reason.NOT_READABLE and sums is None:
        operands = [readable(each) if isinstance(each, Tensor) else each for each in call.operands]
        call, grad = call._replace(x=readable(call.x), operands=operands), readable(grad)
        result = run(call, grad, sums)
    if result is Reason.NOT_LINKED:
        kind = (
            elementwise_kernels.Kind.DERIVATIVE if sums is None else elementwise_kernels.Kind.DERIVATIVE_SUMS
        )
        if not loader.link(epilogue, elementwise_kernels.missing(epilogue, grad, kind), grad.device):
            result = run(call, grad, sums)
    return result
