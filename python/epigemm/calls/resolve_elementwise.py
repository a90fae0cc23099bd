"""Elementwise calls and what their reasons need, as `epigemm.calls.resolve` for linear calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import by_reference, elementwise_kernels, entry
from epigemm.calls.layouts import readable
from epigemm.calls.log import current
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason

_is_profiling = torch._C._autograd._profiler_enabled


def elementwise(call: ElementwiseCall) -> Tensor:
    """D = epilogue(x), with all remedies that it needs; RuntimeError for arguments that do not fit."""
    if current.log is not None:
        return current.log.made(elementwise, call)  # type: ignore[no-any-return]
    if not _is_profiling():
        return _elementwise(call)
    with torch.profiler.record_function(f"epigemm::{call.epilogue.name}"):
        return _elementwise(call)


def _elementwise(call: ElementwiseCall) -> Tensor:
    checks.arguments(call)
    circumstances = dry_runs.ROUTED
    asked: ElementwiseCall | None = call
    if call.out is not None:
        if checks.output_overlap(call.out, call.x, call.others, in_place=True, first=call.epilogue.first):
            asked = call._replace(out=None)
        circumstances |= dry_runs.OUT_APART
    plans.has_gpu_kernels(call.x)  # this makes the device known to C++
    result: Tensor | None = None
    while asked is not None and result is None:
        found = entry.call_elementwise(asked, circumstances)
        if isinstance(found, Tensor):
            result = found
        else:
            mend = _REMEDIES.get(found)
            asked = None if mend is None else mend(asked)
    if result is None:  # no kernel computes it
        return by_reference.elementwise_by_reference(call.epilogue, call.x, call.operands, None, call.out)
    if call.out is not None:
        return result if result is call.out else call.out.copy_(result)
    is_laid_out = result.stride() == call.x.stride() or (asked is not None and asked.x is call.x)
    return result if is_laid_out else torch.empty_like(call.x).copy_(result)


def _link_elementwise(call: ElementwiseCall) -> ElementwiseCall | None:
    missing = elementwise_kernels.missing(call.epilogue, call.x)
    return None if loader.link(call.epilogue, missing, call.x.device) else call


def _copy_elementwise_inputs(call: ElementwiseCall) -> ElementwiseCall | None:
    out = call.out if call.out is not None and call.out.is_contiguous() else None
    operands = [readable(each) if isinstance(each, Tensor) else each for each in call.operands]
    mended = call._replace(x=call.x.contiguous(), operands=operands, out=out)
    pairs = zip((mended.x, out, *operands), (call.x, call.out, *call.operands), strict=True)
    return mended if any(new is not old for new, old in pairs) else None


_REMEDIES: dict[Reason, Callable[[ElementwiseCall], ElementwiseCall | None]] = {
    Reason.NOT_READABLE: _copy_elementwise_inputs,
    Reason.NOT_LINKED: _link_elementwise,
}
