"""Reports work that takes longer than a second: to the logger `epigemm`, or in a terminal by a line on stderr.

At INFO the logger writes that something takes long, and then how long it took; at DEBUG it also writes what took more
than a tenth of a second. At INFO it also writes what was decided for a GPU that this machine need not have. It is
silent by default. `logging.basicConfig(level=logging.INFO)` or `TORCH_LOGS=epigemm` in the environment enables it. If
it is not enabled and stderr is a terminal, a line is shown there during the work: by `rich` if it is installed, else
plain text. `EPIGEMM_PROGRESS=0` turns the line off.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

AFTER = 1.0
"""Seconds after which work is reported."""
NOTED = 0.1
"""Seconds from which on the logger writes at DEBUG how long something took."""

_log = logging.getLogger("epigemm")
_log.addHandler(logging.NullHandler())
_one_line = threading.Lock()  # work that is part of reported work has no line of its own


class Task:
    """Work that may take long."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._lock = threading.Lock()
        self._is_over = self._is_told = False
        self._line: Any = None  # rich's, once it is shown
        self._holds_line = False

    def advance(self) -> None:
        """Count one more of `total` as done."""
        with self._lock:
            self._done += 1
            if self._line is not None:
                self._line.advance(0)

    def tell(self) -> None:
        """Report that it takes long, unless it has ended."""
        with self._lock:
            if self._is_over:
                return
            self._is_told = True
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s ...", self._what)
            elif _wants_line() and _one_line.acquire(blocking=False):
                self._holds_line = True
                self._line = _rich_line(self._what, self._total, self._done)
                if self._line is None:
                    print(f"epigemm: {self._what} ...", file=sys.stderr, flush=True)

    def end(self, seconds: float) -> None:
        """Called when it has ended, or failed."""
        with self._lock:
            self._is_over = True
            if self._is_told or seconds >= NOTED:
                _log.log(logging.INFO if self._is_told else logging.DEBUG, "%s: %.1f s", self._what, seconds)
            if self._line is not None:
                with suppress(Exception):  # the terminal may be closed
                    self._line.stop()
            if self._holds_line:
                _one_line.release()


def note(what: str) -> None:
    """Tell the logger, at INFO, what was decided."""
    _log.info("%s", what)


@contextmanager
def doing(what: str, total: int | None = None) -> Iterator[Task]:
    """A block of work that may take long. `what`: its description; `total`: how many steps `Task.advance` counts."""
    task = Task(what, total)
    timer = threading.Timer(AFTER, task.tell)
    timer.daemon = True
    began = time.perf_counter()
    with suppress(RuntimeError):  # no threads can be started while the interpreter ends
        timer.start()
    try:
        yield task
    finally:
        timer.cancel()
        task.end(time.perf_counter() - began)


def _wants_line() -> bool:
    try:
        return os.environ.get("EPIGEMM_PROGRESS") != "0" and sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


def _rich_line(what: str, total: int | None, done: int) -> Any:
    """A line by rich that is shown until it is stopped; None without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        counted = [BarColumn(20), TextColumn("{task.completed:.0f} of {task.total:.0f}")] if total else []
        columns = (
            SpinnerColumn(),
            TextColumn("epigemm: {task.description}", markup=False),
            *counted,
            TimeElapsedColumn(),
        )
        line = Progress(*columns, console=Console(stderr=True), transient=True)
        line.add_task(what, total=total, completed=done)
        line.start()
        return line
    except Exception:  # a progress line must never cause an error
        return None
