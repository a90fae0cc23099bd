"""Reports work that takes longer than a second: to the logger `epigemm`, or in a terminal by a line on stderr.

At INFO the logger writes that something takes long, and then how long it took; at DEBUG it also writes what took more
than a tenth of a second. At INFO it also writes what was decided for a GPU that this machine need not have. It is
silent by default. `logging.basicConfig(level=logging.INFO)` or `TORCH_LOGS=epigemm` in the environment enables it. If
it is not enabled and stderr is a terminal, a line is written there. `EPIGEMM_PROGRESS=0` turns the line off.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

AFTER = 1.0
"""Seconds after which work is reported."""
NOTED = 0.1
"""Seconds from which on the logger writes at DEBUG how long something took."""

_log = logging.getLogger("epigemm")
_log.addHandler(logging.NullHandler())
_one_line = threading.Lock()  # work that is part of reported work has no line of its own


def note(what: str) -> None:
    """Tell the logger, at INFO, what was decided."""
    _log.info("%s", what)


@contextmanager
def doing(what: str) -> Iterator[threading.Event]:
    """A block of work that may take long, and whether that was told. `what`: its description."""
    told, lines = threading.Event(), list[str]()

    def tell() -> None:
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s ...", what)
        elif _wants_line() and _one_line.acquire(blocking=False):
            lines.append(what)
            print(f"epigemm: {what} ...", file=sys.stderr, flush=True)
        told.set()

    timer = threading.Timer(AFTER, tell)
    timer.daemon = True
    began = time.perf_counter()
    with suppress(RuntimeError):  # no threads can be started while the interpreter ends
        timer.start()
    try:
        yield told
    finally:
        timer.cancel()
        seconds = time.perf_counter() - began
        if seconds >= AFTER and timer.ident is not None:
            timer.join()
        if told.is_set() or seconds >= NOTED:
            _log.log(logging.INFO if told.is_set() else logging.DEBUG, "%s: %.1f s", what, seconds)
        if lines:
            _one_line.release()


def _wants_line() -> bool:
    try:
        return os.environ.get("EPIGEMM_PROGRESS") != "0" and sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False
