"""How long one call takes on a GPU, measured so that alternatives can be compared.

Before every timed call a buffer of twice the L2 cache's size is read. The cache is then full of other data, as between
two layers of a model, and none of that has to be written back, which would slow down the next kernel.

The time is between two CUDA events around the call. A host that is slower than the device would show up as device time;
so a short spin kernel goes first and lets the host run ahead. Where the first event had passed before the call was
enqueued, the host was not ahead: that time is thrown away, and the call is repeated behind a longer spin. After
`_REPEATS` repeats the time is kept as `Late`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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


class Timer:
    """Times single calls on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(max(2 * l2_bytes, 64 << 20) // 4, dtype=torch.float32, device=device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def host_us(self, run: Run) -> float:
        """Run a few times; the median microseconds for which a call keeps the host busy."""
        found = []
        for _ in range(_WARM_UP_CALLS):
            self.synchronize()
            start = time.perf_counter()
            run()
            found.append(1e6 * (time.perf_counter() - start))
        return statistics.median(found)

    def in_turn(self, runs: Sequence[Run], rounds: int, host_us: float) -> list[list[float]]:
        """Milliseconds of so many calls of each.

        All of them interleaved, each round starting with another one, so that a change of the clocks affects all alike.
        """
        samples: list[list[float]] = [[] for _ in runs]
        for first in range(rounds):
            order = [(first + place) % len(runs) for place in range(len(runs))]
            for place, ms in zip(order, self.round([runs[place] for place in order], host_us), strict=True):
                samples[place].append(ms)
        return samples

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        """Run each once, in order; the host runs ahead by half as much again as the slowest call needs."""
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
