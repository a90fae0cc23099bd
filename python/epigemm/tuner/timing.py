"""How long one call takes on a GPU, measured so that alternatives can be compared.

Before every timed call a buffer of twice the L2 cache's size is read. The cache is then full of other data, as between
two layers of a model, and none of that has to be written back, which would slow down the next kernel.

The time is between two CUDA events around the call. A host that is slower than the device would show up as device time;
so a short spin kernel goes first and lets the host run ahead. Where the first event had passed before the call was
enqueued, the host was not ahead: the call is late, and its time too long.
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


def spin_us(host_us: float) -> float:
    """For how long to spin, so that the host runs ahead by half as much again as a call needs that keeps it busy."""
    return min(1.5 * host_us + 20.0, _MAX_SPIN_US)


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

    def times(self, runs: Sequence[Run], spin_us: float) -> list[tuple[bool, float]]:
        """Run each once, in order, each behind a spin: whether it was late, and its milliseconds."""
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
        return [(is_late, start.elapsed_time(end)) for start, end, is_late in found]
