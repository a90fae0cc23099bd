"""What takes longer than a second says so: to the logger `epigemm`, or in a terminal by one line on stderr.

The logger tells at INFO that something takes long, and how long it took; at DEBUG also what took a tenth of that.
Nobody sees it who does not ask: `logging.basicConfig(level=logging.INFO)`, or `TORCH_LOGS=epigemm` in the environment.
Where nobody asks and stderr is a terminal, a line stands there meanwhile: `rich`'s where it is installed, else plain
text. `EPIGEMM_PROGRESS=0` turns the line off.
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
"""Seconds that something may take in silence."""
NOTED = 0.1
"""Seconds from which on the logger tells at DEBUG what something took."""

_log = logging.getLogger("epigemm")
_log.addHandler(logging.NullHandler())
_one_line = threading.Lock()  # what is done within something longer has no line of its own


class Task:
    """Something that may take long."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._lock = threading.Lock()
        self._is_over = self._is_told = False
        self._line: Any = None  # rich's, once it is shown
        self._holds_line = False

    def advance(self) -> None:
        """One more of `total` is done."""
        with self._lock:
            self._done += 1
            if self._line is not None:
                self._line.advance(0)

    def tell(self) -> None:
        """Say that it takes long, unless it is over."""
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
        """It is over, or has failed."""
        with self._lock:
            self._is_over = True
            if self._is_told or seconds >= NOTED:
                _log.log(logging.INFO if self._is_told else logging.DEBUG, "%s: %.1f s", self._what, seconds)
            if self._line is not None:
                with suppress(Exception):  # a terminal that is gone
                    self._line.stop()
            if self._holds_line:
                _one_line.release()


@contextmanager
def doing(what: str, total: int | None = None) -> Iterator[Task]:
    """Around something that may take long. `what`: in words; `total`: how many `Task.advance` counts."""
    task = Task(what, total)
    timer = threading.Timer(AFTER, task.tell)
    timer.daemon = True
    began = time.perf_counter()
    with suppress(RuntimeError):  # there are no new threads while the interpreter ends
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
    """A line of rich's that is shown now and goes when it is stopped; None without rich."""
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
    except Exception:  # a line is worth no error
        return None
