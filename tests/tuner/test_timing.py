"""Calls timed in turn on a GPU: the host is ahead of it, and what was late is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.harness.records import Timing
from epigemm.tuner import timing
from epigemm.tuner.timing import Late, Run, Timer

SOME = torch.randn(32, 32)


class Queue(Timer):
    """A device in numbers: the microsecond at which the host is, and that at which what is queued will be done."""

    def __init__(self) -> None:
        self.host = self.device_us = 0.0
        self.spins: list[float] = []

    def enqueue(self, us: float) -> None:
        self.device_us = max(self.device_us, self.host) + us

    def run(self, *host_us: float) -> Callable[[], Tensor]:
        """A call whose kernel takes 10 us, and which takes the host so long; the last time stays."""
        times = list(host_us)

        def call() -> Tensor:
            self.host += times.pop(0) if len(times) > 1 else times[0]
            self.enqueue(10.0)
            return SOME

        return call

    def _times(self, runs: Sequence[Run], spin_us: float) -> list[float]:
        found = []
        for run in runs:
            self.spins.append(spin_us)
            self.enqueue(spin_us)
            start = self.device_us
            run()
            found.append((Late if start <= self.host else float)((self.device_us - start) / 1e3))
        self.host = max(self.host, self.device_us)
        return found


def test_a_call_that_the_device_waited_for_is_repeated() -> None:
    """The host takes 5 us and once 300: a spin of 27 us hides the first, and the sample of the other is not kept."""
    queue = Queue()
    times = queue.round([queue.run(5.0), queue.run(300.0, 5.0), queue.run(5.0)], host_us=5.0)
    assert times == pytest.approx([0.01] * 3)
    assert not any(isinstance(each, Late) for each in times)
    assert queue.spins == [27.5] * 3 + [55.0]


def test_what_is_always_late_is_counted_in_the_record() -> None:
    """Such as a call that waits for the device: the host does not come ahead of it."""
    queue = Queue()
    late, hidden = queue.in_turn([queue.run(1e6), queue.run(5.0)], 4, host_us=5.0)
    assert len(late) == len(hidden) == 4 and len(queue.spins) == 4 * (2 + timing._REPEATS)
    assert Timing.of(late).late == 4 and Timing.of(hidden).late == 0
    assert Timing.of(hidden).median_ms == pytest.approx(0.01)


@pytest.mark.gpu
def test_the_host_is_ahead_of_a_gpu() -> None:
    """A host that sleeps once within a call does not show in its time; one that always waits is late."""
    device = torch.device("cuda")
    matrix = torch.randn(512, 512, device=device)
    waits = [0.05]

    def sometimes() -> Tensor:
        time.sleep(waits.pop() if waits else 0.0)
        return matrix @ matrix

    def always() -> Tensor:
        found = matrix @ matrix
        torch.cuda.synchronize()
        return found

    timer = Timer(device)
    for run in (always, lambda: matrix @ matrix):
        timer.host_us(run)
    slow, plain, waiting = timer.round([sometimes, lambda: matrix @ matrix, always], host_us=100.0)
    assert not isinstance(slow, Late) and not isinstance(plain, Late)
    assert slow < 10.0 and plain < 10.0
    assert isinstance(waiting, Late)
