"""Processes for jobs: waves of them prepare at once, then measure one by one, alone on their GPU.

While a wave prepares, the processes of the next one load their libraries. So nothing of ours runs beside what is
measured. Several GPUs take waves from one queue.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from benchmarks.models import worker
from benchmarks.models.worker import Prepare

PREPARE_S, MEASURE_S = 240.0, 60.0
"""What takes longer has failed: to load, to build and to compile; to check and to measure, on a GPU."""
_MOST_IN_A_WAVE = 8
Outcome = Callable[[Any, str, Any], None]
"""Told what became of a job: "result", "failed", "skipped" or "not_reached", and the result or the reason."""


def wave_size(gpus: int) -> int:
    """As many as there are cores for, when the next wave loads beside them."""
    return max(1, min(_MOST_IN_A_WAVE, (os.cpu_count() or 1) // (2 * gpus)))


class Worker:
    """The process of a job."""

    def __init__(self, prepare: Prepare, job: Any, device: torch.device, *, quick: bool) -> None:
        self.job = job
        self.outcome: tuple[str, Any] = ("", None)
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=worker.work, args=(theirs, prepare, job, device, quick))
        self._process.start()
        theirs.close()

    @property
    def has_ended(self) -> bool:
        """Whether it is known what became of its job."""
        return bool(self.outcome[0])

    def tell(self, word: str) -> None:
        """One word; it may have ended."""
        with contextlib.suppress(BrokenPipeError):
            self._line.send(word)

    def wait(self, word: str, until: float) -> None:
        """Until it says this, or how it has ended; what says nothing has failed."""
        while not self.has_ended:
            try:
                if not self._line.poll(max(0.0, until - time.monotonic())):
                    self.outcome = ("failed", f"no word in time: it was to say {word!r}")
                    return
                said = self._line.recv()
            except (EOFError, ConnectionResetError):
                self.outcome = ("failed", "the process ended")
                return
            ((what, value),) = said.items()
            if what in ("result", "failed", "skipped"):
                self.outcome = (what, value)
            if what == word:
                return

    def kill(self) -> None:
        """At once, whatever it does."""
        self._process.kill()

    def join(self) -> None:
        """Wait until it is gone."""
        self._process.join()


@dataclass
class Pool:
    """Runs jobs on GPUs, or on the CPU.

    Attributes:
        tell: what to call with each outcome, by one thread at a time.
        budget_s: nothing starts that is not expected to end within it.
        start: makes the process of a job.
        size: of a wave.
    """

    devices: Sequence[torch.device]
    tell: Outcome
    budget_s: float
    start: Callable[[Any, torch.device], Worker]
    size: int = 0
    _lock: Any = field(default_factory=threading.RLock)
    _begin: float = 0.0
    _queue: Iterator[Any] = field(default_factory=lambda: iter(()))
    _prepare_s: float = 0.0  # the longest so far
    _measure_s: float = 0.0

    def run(self, jobs: Sequence[Any]) -> None:
        """All of them, in order as far as there are several GPUs."""
        self._begin, self._queue = time.monotonic(), iter(jobs)
        self.size = self.size or wave_size(len(self.devices))
        # As many processes as cores: none needs threads of its own to keep them busy. They inherit these.
        single = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, single), ThreadPoolExecutor(len(self.devices)) as threads:
            list(threads.map(self._run_on, self.devices))
        for job in self._queue:
            self.tell(job, "not_reached", "no time left")

    def _left_s(self) -> float:
        return self._begin + self.budget_s - time.monotonic()

    def _start(self, device: torch.device) -> list[Worker]:
        """The next wave, if there is time for it."""
        with self._lock:
            if self._left_s() <= self._prepare_s:
                return []
            jobs = itertools.islice(self._queue, self.size)
            return [self.start(job, device) for job in jobs]

    def _run_on(self, device: torch.device) -> None:
        wave, following = self._start(device), list[Worker]()
        try:
            while wave:
                begin = time.monotonic()
                for each in wave:
                    each.tell("prepare")
                following = self._start(device)
                until = min(begin + PREPARE_S, self._begin + self.budget_s)
                for word, workers in (("ready", wave), ("up", following)):
                    for each in workers:
                        each.wait(word, until)
                self._prepare_s = max(self._prepare_s, time.monotonic() - begin)
                # A process that has measured stays, idle: its end would disturb the next one. What failed may be busy.
                _end([each for each in wave if each.has_ended])
                for each in wave:
                    self._measure(each, MEASURE_S if device.type == "cuda" else PREPARE_S)
                    if each.outcome[0] == "failed":
                        _end([each])
                _end(wave)
                wave, following = following, []
        finally:
            _end([*wave, *following])

    def _measure(self, each: Worker, limit_s: float) -> None:
        """And tell what became of it."""
        begin = time.monotonic()
        if not each.has_ended and self._left_s() <= self._measure_s:
            each.outcome = ("not_reached", "no time left")
        elif not each.has_ended:
            each.tell("measure")
            each.wait("result", begin + min(limit_s, self._left_s()))
            self._measure_s = max(self._measure_s, time.monotonic() - begin)
        is_late = each.outcome[0] == "failed" and self._left_s() <= 0
        what, value = ("not_reached", "no time left") if is_late else each.outcome
        with self._lock:
            self.tell(each.job, what, value)


def _end(workers: Sequence[Worker]) -> None:
    for each in workers:
        each.kill()
    for each in workers:
        each.join()
