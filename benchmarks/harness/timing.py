"""How long one call takes, in turn with its alternatives: on a GPU as `epigemm.tuner.timing` has it.

On a CPU it is the wall clock around the call, caches as the previous call left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epigemm.tuner.timing import Run, Timer


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    rounds: int = 15  # at least so many in-turn calls of each alternative
    min_ms: float = 20.0  # and at least so much time of each
    max_rounds: int = 60  # but never more calls than this

    def calls(self, typical_ms: float) -> int:
        """How many calls of something that takes ``typical_ms``."""
        return min(max(self.rounds, int(self.min_ms / max(typical_ms, 1e-3)) + 1), self.max_rounds)


class CpuTimer(Timer):
    """Times single calls on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Nothing: a call returns when it is done."""

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        """As of `Timer`."""
        return [wall_ms(run) for run in runs]


def in_turn(timer: Timer, runs: Sequence[Run], effort: Effort, host_us: float) -> list[list[float]]:
    """Samples of each alternative, all of them interleaved; as many as the first two rounds say."""
    first = min(effort.rounds, 2)
    samples = timer.in_turn(runs, first, host_us)
    rounds = effort.rounds
    if runs and first == 2:
        rounds = effort.calls(min(map(statistics.median, samples)))
    more = timer.in_turn(runs, rounds - first, host_us)
    return [[*these, *those] for these, those in zip(samples, more, strict=True)]


def wall_ms(run: Callable[[], object], count: int = 1) -> float:
    """Milliseconds of the host's clock for one of so many calls, until the last one returns."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) * 1e3 / count


def make_timer(device: torch.device) -> Timer:
    """The timer for a device: "cuda" or "cpu"."""
    return (Timer if device.type == "cuda" else CpuTimer)(device)
