"""Values that are made once in a process, whoever asks for them at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from epigemm.linking.errors import LinkingError

_Value = TypeVar("_Value")


class Once(Generic[_Value]):
    """Keeps what was made by its key. Threads that ask for what another one is making wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[_Value]] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # What a thread of the parent was at work on is never finished here.
        self._lock = threading.Lock()
        self._futures = {key: each for key, each in self._futures.items() if each.done()}

    def get(self, key: str, make: Callable[[], _Value]) -> _Value:
        """The value; made by this call, or waited for. What `make` raises is raised here, and nothing is kept."""
        with self._lock:
            future = self._futures.get(key)
            is_maker = future is None
            if future is None:
                future = self._futures[key] = Future()
        if not is_maker:
            return future.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                self._futures.pop(key, None)
            # Another thread's Ctrl-C is not the waiting one's.
            is_ordinary = isinstance(error, Exception)
            future.set_exception(error if is_ordinary else LinkingError("interrupted in another thread"))
            raise
        future.set_result(value)
        return value

    def peek(self, key: str) -> _Value | None:
        """The value, where it is made already."""
        with self._lock:
            future = self._futures.get(key)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def put(self, key: str, value: _Value) -> None:
        """Keep a value, unless there is one or one is being made."""
        future: Future[_Value] = Future()
        future.set_result(value)
        with self._lock:
            self._futures.setdefault(key, future)

    def values(self) -> dict[str, _Value]:
        """All that is made already, by key."""
        with self._lock:
            futures = dict(self._futures)
        return {key: each.result() for key, each in futures.items() if each.done() and not each.exception()}

    def clear(self) -> None:
        """Forget everything; what is being made is made nonetheless."""
        with self._lock:
            self._futures = {}
