"""Calls of which one kernel gives more than a plain one gives: where that does not pay, the caller makes several calls.

- A pair of products of one x (`LinearCall.weight2`): epilogue(x @ weight.T, ..., x @ weight2.T, ...). The epilogue's
  first matrix is the second product, which is never stored. There are kernels for 16 and 8 bits. The planner compares
  one kernel with two calls (`alternative_microseconds` in csrc/gemm/planner).
- An epilogue with two values for each element (`Traced.stored`): both matrices are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.arguments import autocast
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, resolve
from epigemm.calls.log import current
from epigemm.calls.resolve import Beside
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason


def pair(call: LinearCall) -> Tensor | Reason:
    """The result of a pair of products by one kernel, or the reason why the caller has to make two calls.

    `NO_PAIR` if two plain calls are expected to be faster, or if the kernel cannot read or write the tensors as they
    lie; all arguments fit then. `call` has None for the first matrix, which is the second product.
    """
    return _made(call)


def may_store(call: LinearCall) -> bool:
    """Whether one kernel may store both matrices of a call; else it must be several calls.

    That is so in fp64. And where a product on one slice is followed by others: the planner compares kernels within an
    arithmetic, and a kernel of the next one that stores both may be slower than several in the first.
    """
    if call.x.dtype is torch.float64 or call.invariant:
        return False
    if call.x.dtype is not torch.float32:
        return True
    device_type = "cuda" if call.x.is_meta else call.x.device.type
    return dry_runs.order_on(call, device_type).slices != 1


def both(call: LinearCall, *, is_recorded: bool = False) -> tuple[Tensor, Tensor] | Reason:
    """The result and the second matrix by one kernel, or the reason why the caller has to make several calls.

    `NOT_FUSED` if these are expected to be faster; all arguments fit then. Also where something has to intercept the
    call, or the kernel cannot read or write the tensors as they lie.

    Args:
        call: with the epilogue that has a second value.
        is_recorded: whether autograd has handled the call, and tracers and modes have.
    """
    if not may_store(call) or not plans.has_gpu_kernels(call.x) or call.weight.dim() != 2:
        return Reason.NOT_PLAIN
    stored = call.new_out()
    found = _made(call, stored, is_recorded=is_recorded)
    return (found, stored) if isinstance(found, Tensor) else found


_NEEDS_MORE = (Reason.NOT_LINKED, Reason.NO_MEMORY)


def _made(call: LinearCall, stored: Tensor | None = None, *, is_recorded: bool = False) -> Tensor | Reason:
    """The result by the entry, which sees itself what has to intercept a call; of the resolver if it needs more."""
    found = entry.made(call, stored)
    if isinstance(found, Tensor):
        return found
    is_hidden = found is Reason.NOT_PLAIN and (is_recorded or _is_direct(call))  # autocast hides a call, too
    return resolve.one_kernel(call, Beside(stored)) if is_hidden or found in _NEEDS_MORE else found


def _is_direct(call: LinearCall) -> bool:
    """Whether nothing has to intercept a call, and autocast has nothing to cast."""
    x = call.x
    if current.log is not None:
        current.log.begin()
    if autocast.is_any_on() and autocast.dtype_for(x) not in (None, x.dtype):
        return False
    return entry.sees(*call.inputs, call.out) is None
