"""The batch-invariant mode: a row's bits do not depend on how many other rows a call has, or on where the row stands.

    with epigemm.batch_invariant():
        y = epigemm.linear_relu(x, weight, bias)
    # y[i] has the bits of epigemm.linear_relu(x[i : i + 1], weight, bias)[0]

Outside of the mode the number of rows decides which tile, kernel and, for fp32, arithmetic is used, and each adds in
another order. `docs/numerics.md` says what the mode promises, what it costs, and what it refuses.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

from epigemm.arguments import checks
from epigemm.compilers import is_traced, outside_of_graphs

_Function = TypeVar("_Function", bound=Callable[..., Any])

active = False
"""Whether the mode is on in some thread. If not, a call reads nothing else.

Dynamo traces neither locks nor thread-locals: compiled code is guarded by this.
"""

_lock = threading.RLock()
_everywhere = False
_threads_on = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        # What the blocks around the current call say; without any the switch for all threads decides.
        self.choices: list[bool] = []


_thread = _Thread()


@contextmanager
def _changing() -> Iterator[list[bool]]:
    """The choices of this thread, which change in the block, as the switch for all threads may."""
    global active, _threads_on
    with _lock:
        before = _thread.choices[-1:] == [True]
        yield _thread.choices
        _threads_on += (_thread.choices[-1:] == [True]) - before
        active = _everywhere or _threads_on > 0


def enabled() -> bool:
    """Whether the mode is on for a call made here.

    While torch.compile traces, the mode counts as on if it is on in any thread: Dynamo can guard a compiled function by
    `active`, but not by the state of one thread.
    """
    if not active:
        return False
    if is_traced():
        return True
    return _thread.choices[-1] if _thread.choices else _everywhere


def is_batch_invariant() -> bool:
    """Whether the batch-invariant mode is on for a call made here.

    Example:
        >>> with epigemm.batch_invariant():
        ...     epigemm.is_batch_invariant()
        True
    """
    return enabled()


def set_batch_invariant(enabled: bool) -> None:
    """Switch the batch-invariant mode for the whole process: every thread that is in no `batch_invariant` block.

    Args:
        enabled: whether it is on.

    Raises:
        TypeError: `enabled` is not True or False.

    Example:
        >>> epigemm.set_batch_invariant(True)
        >>> epigemm.is_batch_invariant()
        True
        >>> epigemm.set_batch_invariant(False)
    """
    checks.flag("enabled", enabled)
    outside_of_graphs(_switch)(enabled)


def _switch(enabled: bool) -> None:
    global _everywhere
    with _changing():
        _everywhere = enabled


def _enter(enabled: bool) -> None:
    with _changing() as choices:
        choices.append(enabled)


def _exit() -> None:
    with _changing() as choices:
        choices.pop()


class batch_invariant(ContextDecorator):
    """A mode in which a row's bits do not depend on M, nor on the row's position in x.

    For every linear function, module and dtype: `f(x)[i]` has the bits of `f(x[i : i + 1])[0]`, of `f(x[p])[j]` for any
    choice and order of rows `p` with `p[j] == i`, and so on, for the same weight, epilogue, precision, device and
    version of epigemm. Each call runs a kernel that depends on N, K, dtype and precision alone. Elementwise functions
    need no mode for that on a GPU. Derivatives are not covered. See `docs/numerics.md`.

    A context manager and a decorator of functions. Like torch's grad mode it holds for the current thread and may be
    nested. Compiled functions are in the mode if any thread is.

    Args:
        enabled: False leaves the mode for the time of the block.

    Raises:
        TypeError: `enabled` is not True or False; or a generator or coroutine function was decorated, which would leave
            the mode before it runs.

    Inside, calls that no kernel computes in a fixed order raise RuntimeError before anything is launched: fp64 on GPUs,
    batch statistics of a BatchNorm, and on GPUs other than Hopper's fp32 products in fp32 multiply-adds and whatever
    has a kernel that cannot be linked.

    Example:
        >>> x, weight = torch.randn(8, 64), torch.randn(32, 64)
        >>> with epigemm.batch_invariant():
        ...     together, alone = epigemm.linear(x, weight), epigemm.linear(x[3:4], weight)
        >>> torch.equal(together[3:4], alone)
        True
    """

    def __init__(self, enabled: bool = True) -> None:
        checks.flag("enabled", enabled)
        self._enabled = enabled

    def __call__(self, func: _Function) -> _Function:
        """`func`, run inside the mode."""
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_later(func) for is_later in later):
            raise TypeError(
                f"func: got {func!r}, whose body runs after the call; accepted are plain functions (use "
                "`with epigemm.batch_invariant():` inside of it)"
            )
        return super().__call__(func)

    def _recreate_cm(self) -> batch_invariant:
        return type(self)(self._enabled)  # each call of a decorated function has an object of its own

    def __enter__(self) -> batch_invariant:
        outside_of_graphs(_enter)(self._enabled)
        return self

    def __exit__(self, *exception: object) -> None:
        outside_of_graphs(_exit)()
