"""Pairs of products of one x: one kernel computes epilogue(x @ weight.T, ..., x @ weight2.T, ...), where that pays.

The epilogue's first matrix is the second product, which is never stored. There are kernels for 16 bits. The planner
compares one kernel with two calls (`alternative_microseconds` in csrc/gemm/planner).
"""

from __future__ import annotations

from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import ORDERS
from epigemm.calls import entry
from epigemm.calls.log import current
from epigemm.calls.routed import attempt
from epigemm.linking import loading
from epigemm.planning import dry_runs, plans
from epigemm.planning.reasons import Reason

_OF_16_BITS = ORDERS[0].number


def linear(call: LinearCall, weight2: Tensor) -> Tensor | None:
    """The result of one kernel; None if the caller has to make two calls.

    That is so if something has to intercept the call, if two calls are expected to be faster, or if the kernel cannot
    read or write the tensors as they lie. `call` has None for the first matrix, which is the second product.
    """
    if current.log is not None:
        return current.log.made(linear, call, weight2)  # type: ignore[no-any-return]
    tensors = (*call.inputs[1:], weight2, call.out)
    return attempt(call, tensors, lambda circumstances: _run(call, weight2, circumstances))


def _run(call: LinearCall, weight2: Tensor, circumstances: int) -> Tensor | int:
    """The result, or the reason why there is none, after what can be done about it."""
    epilogue = call.epilogue
    tensors = (epilogue.number, call.x, call.weight, tuple(call.operands), None, call.out)
    options = (_OF_16_BITS, None, 0, False, call.invariant, circumstances, None)
    return entry.ask_again(
        lambda: entry.ask(*tensors, *options, weight2), lambda reason: _is_mended(reason, call, weight2)
    )


def _is_mended(reason: int, call: LinearCall, weight2: Tensor) -> bool:
    """Whether the call can be made again, after what the reason says is lacking was made."""
    if reason == Reason.NOT_READY:
        return plans.has_gpu_kernels(call.x)  # this has loaded what was measured on the device
    if reason != Reason.NOT_LINKED:
        return False
    found = dry_runs.dry_run(call, weight2=weight2)
    return not loading.link(call.epilogue, ",".join(found.missing), call.x.device)
