"""Measures which form of a call is faster, the original model or the fused graph, during the first calls of a kind.

Each call runs exactly one of the two correct forms, so its side effects and random numbers are those of an ordinary
call. Times are taken with CUDA events and the host's clock, without waiting for the device. The longer of the two
counts. If the device is still busy with earlier work, the events show its own time alone, even if the host will be the
slower one in the calls that follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from epigemm.arguments import invariance

Decide = Literal["measure", "predict"]

# The number of turns of each form. The first ones link kernels and warm up, and are not timed.
_LEFT_OUT, _TIMED = 2, 5
_TURNS = 2 * (_LEFT_OUT + _TIMED)
_ALIKE = 0.01  # if the times differ by less, the host's times decide

# Looked up once, because the call's time on the host is microseconds.
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_has_distributed = torch.distributed.is_available()


def measures(decide: object) -> bool:
    """Whether `decide` lets a model's calls be measured; ValueError for an unknown value."""
    accepted = get_args(Decide)
    if decide not in accepted:
        raise ValueError(f"decide: got {decide!r}; accepted are {', '.join(map(repr, accepted))}")
    return decide == "measure"


def may_measure() -> bool:
    """Whether calls may run in two forms whose bits differ."""
    return not (
        wants_same_bits()
        or is_distributed()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def wants_same_bits() -> bool:
    """Whether equal calls have to give equal bits."""
    return _is_deterministic() or (invariance.active and invariance.enabled())


def is_distributed() -> bool:
    """Whether there are other processes, which would have to make the same decision."""
    return _has_distributed and torch.distributed.is_initialized()


class _Turn(NamedTuple):
    is_plain: bool
    start: Any  # CUDA events
    end: Any
    host_ms: float


class _Typical(NamedTuple):
    """Times of one form: of the longer of the device's and the host's time, and of the host's.

    Each is the second least of all turns. Other processes only add time, and more to some turns than to others, so the
    median may be theirs. The least may be a lucky one: kernels have been seen to take one of two times.
    """

    longer_ms: float
    host_ms: float


class Trial:
    """The turns of one kind of call on a CUDA device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._taken = 0
        self._timed: list[_Turn] = []

    @property
    def is_plains_turn(self) -> bool:
        """Whether the next call runs the original model."""
        return self._taken % 2 == 1 and self._taken < _TURNS

    def run(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_plain: bool
    ) -> Any:
        """Run one form of the call, and time it; `is_plain`: which. A call that raises an error is not timed.

        The caller knows the form: another thread may have taken a turn since it asked whose turn it is.
        """
        number, self._taken = self._taken, self._taken + 1
        if not 2 * _LEFT_OUT <= number < _TURNS:
            return call(*args, **kwargs)
        start, began = recorded_event(self._device), time.perf_counter()
        result = call(*args, **kwargs)
        host_ms, end = 1e3 * (time.perf_counter() - began), recorded_event(self._device)
        self._timed.append(_Turn(is_plain, start, end, host_ms))
        return result

    def is_plain_faster(self) -> bool | None:
        """Whether the original model is faster; None if it is not known yet."""
        if self._taken < _TURNS or not all(turn.end.query() for turn in self._timed):
            return None
        if {turn.is_plain for turn in self._timed} != {False, True}:
            return False  # all calls of one form have raised errors
        plain, fused = (self._typical(is_plain=is_plain) for is_plain in (True, False))
        if abs(plain.longer_ms - fused.longer_ms) <= _ALIKE * fused.longer_ms:
            return plain.host_ms < fused.host_ms
        return plain.longer_ms < fused.longer_ms

    def _typical(self, *, is_plain: bool) -> _Typical:
        turns = [turn for turn in self._timed if turn.is_plain == is_plain]
        longer = sorted(max(turn.start.elapsed_time(turn.end), turn.host_ms) for turn in turns)
        host = sorted(turn.host_ms for turn in turns)
        place = min(1, len(turns) - 1)
        return _Typical(longer[place], host[place])


def recorded_event(device: int) -> Any:
    """A CUDA event that is recorded now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
