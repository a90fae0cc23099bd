"""A product with an epilogue that gives two values for each element: one kernel stores both matrices, where that pays.

The epilogue is one whose function has a second value (`Traced.stored`). Where no kernel
that stores it runs, the caller computes the matrices one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import Order
from epigemm.calls import beside, entry
from epigemm.calls.log import current
from epigemm.calls.routed import attempt
from epigemm.planning import dry_runs, plans


class Both(NamedTuple):
    """The two matrices of a call."""

    result: Tensor
    stored: Tensor


def order_on(call: LinearCall, device_type: str) -> Order | None:
    """The arithmetics of such a call on a device of this type; None if it must be several calls.

    That is so in fp64. And where a product on one slice is followed by others: the planner compares kernels within an
    arithmetic, and a kernel of the next one that stores both may be slower than several in the first.
    """
    if call.x.dtype is torch.float64 or call.invariant:
        return None
    order = dry_runs.order_on(call, device_type)
    return None if order.slices == 1 else order


def linear(call: LinearCall, *, is_recorded: bool = False) -> Both | None:
    """Both results of one kernel; None if the caller has to compute them one after the other.

    That is so if something has to intercept the call, if several kernels are expected to be faster, or if the kernel
    cannot read or write the tensors as they lie.

    Args:
        call: with the epilogue that has a second value.
        is_recorded: whether autograd has handled the call, and tracers and modes have.
    """
    if current.log is not None:
        return current.log.made(linear, call)  # type: ignore[no-any-return]
    x = call.x
    order = order_on(call, x.device.type)
    if order is None or not plans.has_gpu_kernels(x):
        return None
    if is_recorded:
        found = _run(call, order, dry_runs.ROUTED)
        return None if isinstance(found, int) else found
    return attempt(call, call.inputs[1:], lambda circumstances: _run(call, order, circumstances))


def _run(call: LinearCall, order: Order, circumstances: int) -> Both | int:
    """Both results, or the reason why there are none, after what can be done about it."""
    tensors = (call.epilogue.number, call.x, call.weight, tuple(call.operands), None, None)
    stored = call.new_out()
    found = beside.Asking(call, order).run(entry.ask_with_store, tensors, circumstances, stored)
    return found if isinstance(found, int) else Both(found, stored)
