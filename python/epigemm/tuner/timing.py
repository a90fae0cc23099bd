"""How long one call takes, measured so that alternatives can be compared.

**In turn.** All alternatives of a case run interleaved, round by round, each round starting with another one,
in one process, so that a change of the clocks affects all alternatives alike. Before every timed call a buffer of
twice the L2 cache's size is read. The cache is then full of other data, as between two layers of a model, and none of
that has to be written back, which would slow down the next kernel.

On a GPU the time is between two CUDA events around the call. A host that is slower than the device would show
up as device time; so a short spin kernel goes first and lets the host run ahead. Where the first event had passed
before the call was enqueued, the host was not ahead: that time is thrown away, and the call is repeated behind a longer
spin. After `_REPEATS` repeats the time is kept as `Late`. The call's cost on the host is reported apart. On a CPU it is
the wall clock around the call, caches as the previous call left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]

_WARM_UP_CALLS = 3
# A spin kernel's unit is the SM clock; 2 GHz is the upper end of today's GPUs, so the spin lasts at least as
# asked.
_SPIN_CYCLES_PER_US = 2000
_MAX_SPIN_US = 2000.0
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


class Timer:
    """Times single calls on one device: by the wall clock, on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        """Run each once, in order, and return the milliseconds of each call."""
        return [wall_ms(run) for run in runs]

    def synchronize(self) -> None:
        """Wait for everything on the device."""

    def warm_up(self, run: Run) -> float:
        """Run a few times; the median microseconds for which a call keeps the host busy."""
        host: list[float] = []
        for _ in range(_WARM_UP_CALLS):
            self.synchronize()
            host.append(1e3 * wall_ms(run))
        self.synchronize()
        return statistics.median(host)

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


class CudaTimer(Timer):
    """CUDA events around each call, the L2 cache flushed before it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(max(2 * l2_bytes, 64 << 20) // 4, dtype=torch.float32, device=device)

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        """As of `Timer`; the host runs ahead by half as much again as the slowest call needs."""
        spin_us = min(1.5 * host_us + 20.0, _MAX_SPIN_US)
        times = self._times(runs, spin_us)
        for _ in range(_REPEATS):
            late = [place for place, ms in enumerate(times) if isinstance(ms, Late)]
            if not late:
                break
            spin_us *= 2
            for place, ms in zip(late, self._times([runs[place] for place in late], spin_us), strict=True):
                times[place] = ms
        return times

    def _times(self, runs: Sequence[Run], spin_us: float) -> list[float]:
        """The milliseconds of each behind a spin, `Late` where the spin was over before the call was enqueued."""
        cuda: Any = torch.cuda
        found: list[tuple[Any, Any, bool]] = []
        for run in runs:
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(int(spin_us * _SPIN_CYCLES_PER_US))
            self._flush.sum()
            start.record()
            run()
            end.record()
            found.append((start, end, start.query()))
        self.synchronize()
        return [(Late if is_late else float)(start.elapsed_time(end)) for start, end, is_late in found]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def wall_ms(run: Callable[[], object], count: int = 1) -> float:
    """Milliseconds of the host's clock for one of so many calls, until the last one returns."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) * 1e3 / count


def make_timer(device: torch.device) -> Timer:
    """The timer for a device: "cuda" or "cpu"."""
    return (CudaTimer if device.type == "cuda" else Timer)(device)
