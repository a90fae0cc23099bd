"""How long one call takes, in turn with its alternatives.

All alternatives of a case run interleaved, round by round, each round starting with another one, in one process, so
that a change of the clocks affects all alternatives alike.

On a GPU the time is that of `epigemm.tuner.timing`. A call that was late is repeated behind a longer spin. After
`_REPEATS` repeats the time is kept as `Late`. The call's cost on the host is reported apart. On a CPU it is the wall
clock around the call, caches as the previous call left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epigemm.tuner import timing

Run = timing.Run

_REPEATS = 3  # each behind a spin twice as long


class Late(float):
    """The milliseconds of a call that the device waited for, after all repeats."""


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    rounds: int = 15  # at least so many in-turn calls of each alternative
    min_ms: float = 20.0  # and at least so much time of each
    max_rounds: int = 60  # but never more calls than this

    def calls(self, typical_ms: float) -> int:
        """How many calls of something that takes ``typical_ms``."""
        return min(max(self.rounds, int(self.min_ms / max(typical_ms, 1e-3)) + 1), self.max_rounds)


class Timer(timing.Timer):
    """Times single calls in turn on a GPU: CUDA events around each call, the L2 cache flushed before it."""

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        """Run each once, in order, and return the milliseconds of each call."""
        spin_us = timing.spin_us(host_us)
        times = self.times(runs, spin_us)
        for _ in range(_REPEATS):
            late = [place for place, (is_late, _) in enumerate(times) if is_late]
            if not late:
                break
            spin_us *= 2
            for place, found in zip(late, self.times([runs[each] for each in late], spin_us), strict=True):
                times[place] = found
        return [Late(ms) if is_late else ms for is_late, ms in times]

    def in_turn(self, runs: Sequence[Run], effort: Effort, host_us: float) -> list[list[float]]:
        """Samples of each alternative, all of them interleaved."""
        samples: list[list[float]] = [[] for _ in runs]
        wanted = effort.rounds if runs else 0
        done = 0
        while done < wanted:
            order = [(done + i) % len(runs) for i in range(len(runs))]
            for index, ms in zip(order, self.round([runs[i] for i in order], host_us), strict=True):
                samples[index].append(ms)
            done += 1
            if done == 2:
                wanted = effort.calls(min(statistics.median(s) for s in samples))
        return samples


class CpuTimer(Timer):
    """The same on a CPU, by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Nothing: a call returns when it is done."""

    def times(self, runs: Sequence[Run], spin_us: float) -> list[tuple[bool, float]]:
        """As of `Timer`."""
        return [(False, wall_ms(run)) for run in runs]


def wall_ms(run: Callable[[], object], count: int = 1) -> float:
    """Milliseconds of the host's clock for one of so many calls, until the last one returns."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) * 1e3 / count


def make_timer(device: torch.device) -> Timer:
    """The timer for a device: "cuda" or "cpu"."""
    return (Timer if device.type == "cuda" else CpuTimer)(device)
