"""`keep_packs`: plain calls keep the fp16 slices of their weights, as the layers of `epigemm.nn` do.

`set_keep_packs` switches the mode for all threads, a `keep_packs` block for its own thread.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from epigemm.arguments import checks
from epigemm.arguments.modes import Block, Mode, Shared
from epigemm.compilers import is_traced
from epigemm.packs import weight_packs

active = False
"""Whether the mode is on in some thread. If not, calls and Dynamo's guards read only this and `traced`."""

traced: bool | None = None
"""The choice of code under torch.compile. Dynamo can trace writes of a global, but not locks and thread-locals."""


_shared = Shared(__name__)
_mode = Mode(_shared)


def enabled() -> bool:
    """Whether the mode is on for a call made here.

    While torch.compile traces, a block around the compiled function counts if any thread is in one. Dynamo can guard
    on the global `active`, but not on a thread-local.
    """
    if is_traced():
        return active if traced is None else traced
    return _mode.enabled(traced)


def pack_use(weight: Tensor) -> str:
    """What a plain call may do with its weight's pack.

    Packs are kept only for Parameters. Another tensor may be temporary, made for one call.
    """
    return weight_packs.KEEP if enabled() and isinstance(weight, Parameter) else weight_packs.FIND


def set_keep_packs(enabled: bool) -> None:
    """Switch `keep_packs` for the whole process: every thread that is in no `keep_packs` block.

    Args:
        enabled: whether it is on.

    Raises:
        TypeError: `enabled` is not True or False.

    Example:
        >>> epigemm.set_keep_packs(True)
        >>> epigemm.set_keep_packs(False)
    """
    checks.flag("enabled", enabled)
    if is_traced():
        _trace(enabled)
        return
    global traced
    with _shared.lock:
        traced = None
        _shared.switch(enabled)


class keep_packs(Block):
    """Let plain calls keep the fp16 slices of weights that are `torch.nn.Parameter`s: these are split only once.

    Results are those of the same calls without it. It does for the functions of epigemm what the layers of `epigemm.nn`
    do in any case. It does not apply to fused models, for which there is `epigemm.fuse(model, keep_packs=True)`.

    A context manager, for its block and the current thread, and a decorator, for each call of the function; blocks may
    be nested. It may be used in code under torch.compile, without graph breaks. A compiled function is compiled again
    when it is first called while some thread has the mode on.

    Slices belong to the weight, are freed with it, and are made again when it has changed. Leaving the mode frees
    nothing: later calls outside of it use current slices, and make none. After writes that torch does not count, such
    as `weight.data.add_(...)`, call `epigemm.pack(weight).repack()` (see `epigemm.packs`). No slices are kept for
    weights that need a gradient or are no Parameters, and none where fp32 products do not run on fp16 slices (CPUs,
    most GeForce GPUs, small K).

    Memory, for an fp32 weight `[N, K]`: `2 bytes * 2 slices * N * K`, as many bytes as the weight itself; at precision
    "high" `2 bytes * 1 slice * N * K`, half of that. K is rounded up to a multiple of 64, at "high" of 8, and each row
    takes 12 bytes more. A weight that is used at both precisions takes both.

    Args:
        enabled: False: calls in the block make no slices to be kept.

    Raises:
        TypeError: `enabled` is not True or False; or a generator or coroutine function was decorated, whose body would
            run outside of the mode.

    Example:
        >>> layer = torch.nn.Linear(64, 32)
        >>> with torch.no_grad(), epigemm.keep_packs():
        ...     epigemm.linear_relu(torch.randn(8, 64), layer.weight, layer.bias).shape
        torch.Size([8, 32])
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._before: list[bool | None] = []  # what `traced` was before the blocks that a compiler traced

    def __enter__(self) -> keep_packs:
        if is_traced():
            self._before.append(_trace(self._enabled))
        else:
            _mode.enter(self._enabled)
        return self

    def __exit__(self, *exception: object) -> None:
        # Undo what __enter__ did. `is_traced` may have changed since, because a graph break in the block ends the
        # trace.
        if self._before:
            _trace(self._before.pop())
        else:
            _mode.exit()


def _trace(choice: bool | None) -> bool | None:
    """Switch the mode in code that a compiler traces; returns the previous value."""
    global traced
    before, traced = traced, choice
    return before
