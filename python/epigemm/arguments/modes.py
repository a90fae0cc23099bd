"""What the modes have in common: a switch for all threads, and blocks that override it in their own thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from epigemm.arguments import checks

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Mode(threading.local):
    """One mode, as each thread sees it.

    Dynamo traces neither locks nor thread-locals. So each mode's module has a global `active`, whether the mode is on
    in some thread, by which compiled code can be guarded.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        # what the blocks around the current call say; None: the switch for all threads decides
        self._choice: bool | None = None
        self._outer: list[bool | None] = []

    def enabled(self, otherwise: bool | None = None) -> bool:
        """Whether the mode is on for a call made here. `otherwise`: what decides before the switch for all threads."""
        choice = otherwise if self._choice is None else self._choice
        return self._shared.everywhere if choice is None else choice

    def enter(self, enabled: bool) -> None:
        """Begin a block."""
        self._outer.append(self._choice)
        self._choose(enabled)

    def exit(self) -> None:
        """End it: the state from before the block holds again."""
        self._choose(self._outer.pop())

    def _choose(self, choice: bool | None) -> None:
        with self._shared.lock:
            self._shared.threads_on += (choice is True) - (self._choice is True)
            self._choice = choice
            self._shared.update()


class Shared:
    """What all threads see of a mode, whose module is called `module`."""

    def __init__(self, module: str) -> None:
        self.lock = threading.RLock()
        self.everywhere = False
        self.threads_on = 0
        self._module: Any = sys.modules[module]

    def switch(self, enabled: bool) -> None:
        """Switch the mode on or off for all calls that are in no block."""
        with self.lock:
            self.everywhere = enabled
            self.update()

    def update(self) -> None:
        """To be called, under the lock, when something has changed."""
        self._module.active = self.everywhere or self.threads_on > 0


class Block(ContextDecorator):
    """Base class of the modes' blocks: a context manager, and a decorator that opens a block for each call."""

    def __init__(self, enabled: bool = True) -> None:
        checks.flag("enabled", enabled)
        self._enabled = enabled

    def __call__(self, func: _Function) -> _Function:
        """`func`, run inside the mode."""
        checks.runs_when_called(func, f"with epigemm.{type(self).__name__}():")
        return super().__call__(func)

    def _recreate_cm(self) -> Any:
        return type(self)(self._enabled)  # each call of a decorated function has an object of its own
