"""What the modes have in common: a switch for all threads, and blocks that come before it in theirs."""

from __future__ import annotations

import sys
import threading
from typing import Any


class Mode(threading.local):
    """One mode, as each thread sees it.

    Dynamo follows no lock and no thread-local: whether the mode is on in some thread is a global of the mode's module,
    `active`, that compiled code can be guarded by.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        # what the blocks around the current call say; None: what holds everywhere
        self._choice: bool | None = None
        self._outer: list[bool | None] = []

    def enabled(self, otherwise: bool | None = None) -> bool:
        """Whether the mode is on for a call made here; `otherwise`: what comes before what holds everywhere."""
        choice = otherwise if self._choice is None else self._choice
        return self._shared.everywhere if choice is None else choice

    def enter(self, enabled: bool) -> None:
        """Begin a block."""
        self._outer.append(self._choice)
        self._choose(enabled)

    def exit(self) -> None:
        """End it: what was before holds again."""
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

    def update(self) -> None:
        """To be called, under the lock, when something has changed."""
        self._module.active = self.everywhere or self.threads_on > 0
