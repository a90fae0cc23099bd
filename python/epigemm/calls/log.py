"""The log of a thread's calls: while one is open, each call is told to it where the call is made.

`epigemm.explain.log.Log` is the only kind.

A log is a mode of torch functions. So the entry makes no call while one is open, and Python makes all of them. Nothing
but this mode is hidden from the entry then: autograd, other modes and tracers have their say.
"""

from __future__ import annotations

import threading
from typing import Any


class _Current(threading.local):
    log: Any = None


current = _Current()
"""Of this thread."""
