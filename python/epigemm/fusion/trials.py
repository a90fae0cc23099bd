"""Which form of a call is faster, the model's own or the fused one: they take turns in the first calls of a kind.

Each call runs exactly one form, and both are right: so what it writes and draws is what it would be. They are timed by
CUDA events and the host's clock, and nothing waits for the device. Where the GPU waits for the host, the time between
two events is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch

from epigemm.arguments import invariance

Decide = Literal["measure", "predict"]

# Turns of each form: the first ones link kernels and warm up, and are left out.
_LEFT_OUT, _TIMED = 2, 5
_TURNS = 2 * (_LEFT_OUT + _TIMED)
_ALIKE = 0.01  # times that differ by less are told apart by the host's

# Looked up once: a call is measured in microseconds.
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_has_distributed = torch.distributed.is_available()


def measures(decide: object) -> bool:
    """Whether a model's calls may be measured; ValueError: `decide` is no word for it."""
    accepted = get_args(Decide)
    if decide not in accepted:
        raise ValueError(f"decide: got {decide!r}; accepted are {', '.join(map(repr, accepted))}")
    return decide == "measure"


def may_measure() -> bool:
    """Whether calls may run in one form and then in another, whose bits differ."""
    return not (
        wants_same_bits()
        or is_distributed()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def wants_same_bits() -> bool:
    """Whether equal calls have to give equal bits, whatever was called before."""
    return _is_deterministic() or (invariance.active and invariance.enabled())


def is_distributed() -> bool:
    """Whether there are other processes, which have to decide alike."""
    return _has_distributed and torch.distributed.is_initialized()


class _Turn(NamedTuple):
    is_plain: bool
    start: Any  # CUDA events
    end: Any
    host_ms: float


class Trial:
    """The turns of one kind of call on a CUDA device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._taken = 0
        self._timed: list[_Turn] = []

    @property
    def is_plains_turn(self) -> bool:
        """Whether the next call runs the model's own form."""
        return self._taken % 2 == 1 and self._taken < _TURNS

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a form of the call, the one whose turn it is, and time it; one that raises is left out."""
        number, self._taken = self._taken, self._taken + 1
        if not 2 * _LEFT_OUT <= number < _TURNS:
            return call(*args, **kwargs)
        start, began = recorded_event(self._device), time.perf_counter()
        result = call(*args, **kwargs)
        host_ms, end = 1e3 * (time.perf_counter() - began), recorded_event(self._device)
        self._timed.append(_Turn(number % 2 == 1, start, end, host_ms))
        return result

    def is_plain_faster(self) -> bool | None:
        """Which form is faster; None: it is not known yet."""
        if self._taken < _TURNS or not all(turn.end.query() for turn in self._timed):
            return None
        if {turn.is_plain for turn in self._timed} != {False, True}:
            return False  # all calls of a form have raised
        plain, fused = (self._medians(is_plain=is_plain) for is_plain in (True, False))
        if abs(plain[0] - fused[0]) <= _ALIKE * fused[0]:
            return plain[1] < fused[1]
        return plain[0] < fused[0]

    def _medians(self, *, is_plain: bool) -> tuple[float, float]:
        """By the device's clock, and by the host's."""
        turns = [turn for turn in self._timed if turn.is_plain == is_plain]
        return median(turn.start.elapsed_time(turn.end) for turn in turns), median(t.host_ms for t in turns)


def recorded_event(device: int) -> Any:
    """A CUDA event of now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
