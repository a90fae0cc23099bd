"""Calls timed in turn on a GPU: the host is ahead of it, and what was late is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.harness.records import Timing
from epigemm.tuner import timing
from epigemm.tuner.timing import Late, Timer

SOME = torch.randn(32, 32)


@dataclass
class Queue:
    """A device in numbers: the microsecond at which the host is, and that at which what is queued will be done."""

    host: float = 0.0
    device: float = 0.0
    spins: list[float] = field(default_factory=list)

    def enqueue(self, us: float) -> None:
        self.device = max(self.device, self.host) + us

    def spin(self, cycles: int) -> None:
        self.spins.append(cycles / timing._SPIN_CYCLES_PER_US)
        self.enqueue(self.spins[-1])

    def event(self, enable_timing: bool) -> Event:
        return Event(self)

    def synchronize(self, device: torch.device) -> None:
        self.host = max(self.host, self.device)

    def run(self, *host_us: float) -> Callable[[], Tensor]:
        """A call whose kernel takes 10 us, and which takes the host so long; the last time stays."""
        times = list(host_us)

        def call() -> Tensor:
            self.host += times.pop(0) if len(times) > 1 else times[0]
            self.enqueue(10.0)
            return SOME

        return call


@dataclass
class Event:
    """As torch.cuda.Event."""

    queue: Queue
    at: float = 0.0

    def record(self) -> None:
        self.at = max(self.queue.device, self.queue.host)

    def query(self) -> bool:
        return self.at <= self.queue.host

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    properties = SimpleNamespace(L2_cache_size=0)
    for name, value in (
        ("_sleep", found.spin),
        ("Event", found.event),
        ("synchronize", found.synchronize),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_a_call_that_the_device_waited_for_is_repeated(queue: Queue) -> None:
    """The host takes 5 us and once 300: a spin of 27 us hides the first, and the sample of the other is not kept."""
    timer = Timer(torch.device("cpu"))
    runs = [queue.run(5.0), queue.run(300.0, 5.0), queue.run(5.0)]
    times = timer.round(runs, host_us=5.0)
    assert times == pytest.approx([0.01] * 3)
    assert not any(isinstance(each, Late) for each in times)
    assert queue.spins == [27.5] * 3 + [55.0]


def test_what_is_always_late_is_counted_in_the_record(queue: Queue) -> None:
    """Such as a call that waits for the device: the host does not come ahead of it."""
    timer = Timer(torch.device("cpu"))
    late, hidden = timer.in_turn([queue.run(1e6), queue.run(5.0)], 4, host_us=5.0)
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
