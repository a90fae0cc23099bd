"""How far a run has come, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_FEW_STEPS = 200


@contextlib.contextmanager
def shown_progress(total: int) -> Iterator[Any]:
    """A line for each step that is finished; of many short steps, one line a second."""
    started = shown = time.monotonic()
    done = 0

    def told(text: str, finished: bool) -> None:
        nonlocal done, shown
        done += finished
        now = time.monotonic()
        if finished and (total <= _FEW_STEPS or done == total or now - shown >= 1.0):
            print(f"[{now - started:6.1f} s] {done}/{total} {text}", file=sys.stderr, flush=True)
            shown = now

    yield told
