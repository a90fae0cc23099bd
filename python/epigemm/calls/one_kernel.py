"""Calls of which one kernel gives more than a plain one gives: where that does not pay, the caller makes several calls.

- A pair of products of one x (`LinearCall.weight2`): epilogue(x @ weight.T, ..., x @ weight2.T, ...). The epilogue's
  first matrix is the second product, which is never stored. There are kernels for 16 bits. The planner compares one
  kernel with two calls (`alternative_microseconds` in csrc/gemm/planner).
- An epilogue with two values for each element (`Traced.stored`): both matrices are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, resolve
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason

_Found = TypeVar("_Found")
_any_autocast = torch._C._is_any_autocast_enabled
_is_profiling = torch._C._autograd._profiler_enabled


class Both(NamedTuple):
    """The two matrices of a call."""

    result: Tensor
    stored: Tensor


def pair(call: LinearCall) -> Tensor | None:
    """The result of a pair of products by one kernel; None if the caller has to make two calls.

    That is so if something has to intercept the call, if two calls are expected to be faster, or if the kernel cannot
    read or write the tensors as they lie. `call` has None for the first matrix, which is the second product.
    """
    return attempt(
        call, (*call.inputs[1:], call.out), lambda circumstances: resolve.one_kernel(call, circumstances)
    )


def may_store(call: LinearCall) -> bool:
    """Whether one kernel may store both matrices of a call; else it must be several calls.

    That is so in fp64. And where a product on one slice is followed by others: the planner compares kernels within an
    arithmetic, and a kernel of the next one that stores both may be slower than several in the first.
    """
    if call.x.dtype is torch.float64 or call.invariant:
        return False
    device_type = "cuda" if call.x.is_meta else call.x.device.type
    return dry_runs.order_on(call, device_type).slices != 1


def both(call: LinearCall, *, is_recorded: bool = False) -> Both | None:
    """Both matrices by one kernel; None if the caller has to compute them one after the other.

    That is so if something has to intercept the call, if several kernels are expected to be faster, or if the kernel
    cannot read or write the tensors as they lie.

    Args:
        call: with the epilogue that has a second value.
        is_recorded: whether autograd has handled the call, and tracers and modes have.
    """
    if not may_store(call) or not plans.has_gpu_kernels(call.x):
        return None
    stored = call.new_out()

    def ask(circumstances: int) -> Tensor | int:
        return resolve.one_kernel(call, circumstances, stored)  # type: ignore[no-any-return]

    found = ask(dry_runs.ROUTED) if is_recorded else attempt(call, call.inputs[1:], ask)
    return Both(found, stored) if isinstance(found, Tensor) else None


def attempt(
    call: LinearCall, tensors: Sequence[Tensor | None], ask: Callable[[int], _Found | int]
) -> _Found | None:
    """What `ask` makes of a call in its circumstances (`dry_runs.ROUTED`, or 0); None where that is a reason.

    Calls that autocast or a profiler alone keeps from being plain are made as routed ones. `tensors`: all that the call
    has, but x.
    """
    found = ask(0)
    if isinstance(found, int) and found == Reason.NOT_PLAIN and _is_routed(call.x, *tensors):
        if not _is_profiling():
            found = ask(dry_runs.ROUTED)
        else:
            with torch.profiler.record_function(f"epigemm::{call.epilogue.name}"):
                found = ask(dry_runs.ROUTED)
    return None if isinstance(found, int) else found


def _is_routed(x: Tensor, *others: Tensor | None) -> bool:
    """Whether only autocast or a profiler has kept a call from being plain, and autocast has nothing to cast."""
    if not (_any_autocast() or _is_profiling()) or entry.sees(x, *others) is not None:
        return False
    device = x.device.type
    is_cast = not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) is x.dtype
    return is_cast and plans.has_gpu_kernels(x)
