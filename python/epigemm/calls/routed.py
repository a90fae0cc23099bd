"""Calls that autocast or a profiler alone keeps from being plain: the entry makes them as routed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry
from epigemm.planning import dry_runs, plans
from epigemm.planning.reasons import Reason

_Found = TypeVar("_Found")
_any_autocast = torch._C._is_any_autocast_enabled
_is_profiling = torch._C._autograd._profiler_enabled


def attempt(
    call: LinearCall, tensors: Sequence[Tensor | None], ask: Callable[[int], _Found | int]
) -> _Found | None:
    """What `ask` makes of a call in its circumstances (`dry_runs.ROUTED`, or 0); None where that is a reason.

    `tensors`: all that the call has, but x.
    """
    found = ask(0)
    if not isinstance(found, int):
        return found
    if found != Reason.NOT_PLAIN or not is_routed(call.x, *tensors):
        return None
    if not _is_profiling():
        found = ask(dry_runs.ROUTED)
    else:
        with torch.profiler.record_function(f"epigemm::{call.epilogue.name}"):
            found = ask(dry_runs.ROUTED)
    return None if isinstance(found, int) else found


def is_routed(x: Tensor, *others: Tensor | None) -> bool:
    """Whether only autocast or a profiler has kept a call from being plain, and autocast has nothing to cast."""
    if not (_any_autocast() or _is_profiling()) or entry.sees(x, *others) is not None:
        return False
    device = x.device.type
    is_cast = not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) is x.dtype
    return is_cast and plans.has_gpu_kernels(x)
