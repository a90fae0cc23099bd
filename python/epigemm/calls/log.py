"""The log of a thread's calls: while one is open, each call is told to it where the call is made.

A log is a mode of torch functions. So the entry makes no call while one is open, and calls take the road in Python. On
that road nothing but this mode is hidden from the entry: autograd, other modes and tracers have their say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import overrides
from torch.overrides import TorchFunctionMode

from epigemm.arguments.calls import LinearCall

_pop_mode: Callable[[], Any] = overrides._pop_mode
_push_mode: Callable[[Any], None] = overrides._push_mode
_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack


_Log = TypeVar("_Log", bound="Log")


class Log(TorchFunctionMode):
    """What calls are told to; open while it is entered."""

    def begin(self, recorded: LinearCall | None = None) -> None:
        """A public function has been called. What it makes is told next; `recorded`: for which call autograd has it."""
        raise NotImplementedError

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """What stands for `function(*args)`, a call that is made now."""
        raise NotImplementedError

    def note(self, function: Callable[..., Any], *args: Any) -> Any:
        """Such a call, of tensors without values: it is made by who asks."""
        raise NotImplementedError

    _outer: Sequence[Log | None] = ()

    def __enter__(self: _Log) -> _Log:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer, current.log = (*self._outer, current.log), self
        return self

    def __exit__(self, *about: Any) -> None:
        *self._outer, current.log = self._outer
        super().__exit__(*about)  # type: ignore[no-untyped-call]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Without this log. Modes that were entered later stay."""
        is_there = self in _modes()  # not while it looks at a function
        above = list(iter(_pop_mode, self)) if is_there else []
        before, current.log = current.log, None
        for mode in reversed(above):
            _push_mode(mode)
        try:
            yield
        finally:
            current.log = before
            for _ in above:
                _pop_mode()
            for mode in reversed([*above, self] if is_there else []):
                _push_mode(mode)


class _Current(threading.local):
    log: Log | None = None


current = _Current()
"""Of this thread."""
