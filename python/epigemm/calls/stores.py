"""A product with an epilogue that gives two values for each element: one kernel stores both matrices, where that pays.

The epilogue is one of `epigemm.epilogues.traced` whose function has a second value (`Traced.stored`). Where no kernel
that stores it runs, the caller computes the matrices one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import Order
from epigemm.calls import beside, entry
from epigemm.calls.routed import attempt
from epigemm.epilogues.keeping import keeping as keeping_epilogue
from epigemm.epilogues.traced import LinkedEpilogue
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


def of_entry(call: LinearCall, epilogue: LinkedEpilogue, given: entry.Vectors) -> LinearCall:
    """`call` with another epilogue, whose operands are given in the entry's form."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    numbers = [float(each) for each in given if isinstance(each, (int, float))]
    return call._replace(epilogue=epilogue, bias=None, operands=tensors, scalars=numbers)


def keeping(call: LinearCall) -> tuple[LinearCall, entry.Vectors] | None:
    """The call that also gives the product, with the bias that is added to it, and its operands in the entry's form.

    None where the epilogue is none of those (`epigemm.epilogues.keeping`).
    """
    given = call.epilogue.in_order(call.bias, call.operands, call.scalars)
    has_bias = call.bias is not None
    epilogue = None if given is None else keeping_epilogue(call.epilogue, has_bias=has_bias)
    if given is None or epilogue is None:
        return None
    if call.epilogue.takes_bias and not has_bias:
        given = given[1:]
    return of_entry(call, epilogue, given), given


def linear(call: LinearCall, given: entry.Vectors, *, is_recorded: bool = False) -> Both | None:
    """Both results of one kernel; None if the caller has to compute them one after the other.

    That is so if something has to intercept the call, if several kernels are expected to be faster, or if the kernel
    cannot read or write the tensors as they lie.

    Args:
        call: with the epilogue that has a second value; its operands are used to link the kernel.
        given: the operands in the entry's form.
        is_recorded: whether autograd has handled the call, and tracers and modes have.
    """
    x = call.x
    order = order_on(call, x.device.type)
    if order is None or not plans.has_gpu_kernels(x):
        return None
    if is_recorded:
        found = _run(call, given, order, dry_runs.ROUTED)
        return None if isinstance(found, int) else found
    tensors = [call.weight, *(each for each in given if isinstance(each, Tensor))]
    return attempt(call, tensors, lambda circumstances: _run(call, given, order, circumstances))


def _run(call: LinearCall, given: entry.Vectors, order: Order, circumstances: int) -> Both | int:
    """Both results, or the reason why there are none, after what can be done about it."""
    tensors = (call.epilogue.number, call.x, call.weight, given, None, None)
    stored = call.new_out()
    found = beside.Asking(call, order).run(entry.ask_with_store, tensors, circumstances, stored)
    return found if isinstance(found, int) else Both(found, stored)
