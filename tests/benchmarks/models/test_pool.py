"""Waves of processes: order, alone while one measures, time limits, several GPUs. No process is started here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.models import pool
from benchmarks.models.jobs import INFERENCE, Case, Job
from benchmarks.models.pool import Pool, Worker

CPU = torch.device("cpu")
JOBS = [Job(Case("nerf", "bf16", INFERENCE, (batch,)), "fuse") for batch in range(1, 8)]
Answer = Callable[[Job, str], Any]


class Stage:
    """What happens, in order; `answers` says what a process says to a word."""

    def __init__(self, answers: Answer) -> None:
        self.answers, self.log, self.alive = answers, list[tuple[str, int]](), set[int]()

    def worker(self, prepare: object, job: Job, device: torch.device, *, quick: bool) -> Worker:
        return FakeWorker(self, job)


class FakeWorker(Worker):
    def __init__(self, stage: Stage, job: Job) -> None:
        self.stage, self.job, self.outcome = stage, job, ("", None)
        self.number = job.case.batch[0]
        self.log("start")

    def log(self, what: str) -> None:
        self.stage.log.append((what, self.number))
        if what == "start":
            self.stage.alive.add(self.number)

    def tell(self, word: str) -> None:
        self.log(word)

    def wait(self, word: str, until: float) -> None:
        said = self.stage.answers(self.job, word)
        if isinstance(said, tuple) and not self.has_ended:
            self.outcome = said
        self.log(word)

    def kill(self) -> None:
        self.log("kill")

    def join(self) -> None:
        self.stage.alive.discard(self.number)


def run(
    monkeypatch: pytest.MonkeyPatch, answers: Answer, budget_s: float = 60.0, gpus: int = 1, size: int = 3
) -> tuple[Stage, list[tuple[int, str]]]:
    stage, told = Stage(answers), list[tuple[int, str]]()
    monkeypatch.setattr(pool, "Worker", stage.worker)

    def tell(job: Job, what: str, value: Any) -> None:
        told.append((job.case.batch[0], what))

    Pool([CPU] * gpus, tell, budget_s, size=size).run(JOBS)
    assert not stage.alive
    return stage, told


def fine(job: Job, word: str) -> Any:
    return ("result", {}) if word == "result" else None


def test_waves_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, told = run(monkeypatch, fine)
    assert told == [(number, "result") for number in range(1, 8)]
    # The next wave loads before one of this measures, and prepares after all of this have.
    log = stage.log
    for first, following in ((1, 4), (4, 7)):
        assert log.index(("up", following)) < log.index(("measure", first))
        assert log.index(("measure", first + 2)) < log.index(("prepare", following))
    assert log.index(("prepare", 3)) < log.index(("ready", 1))
    # Processes end when all of their wave have measured.
    assert log.index(("measure", 3)) < log.index(("kill", 1)) < log.index(("prepare", 4))


def test_what_fails_or_is_skipped_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(job: Job, word: str) -> Any:
        number = job.case.batch[0]
        if word == "ready" and number in (2, 3):
            return ("failed", "why") if number == 2 else ("skipped", "why")
        return fine(job, word)

    stage, told = run(monkeypatch, answers)
    assert dict(told) == {1: "result", 2: "failed", 3: "skipped", **dict.fromkeys(range(4, 8), "result")}
    assert ("measure", 2) not in stage.log and ("measure", 3) not in stage.log
    assert max(stage.log.index(("kill", number)) for number in (2, 3)) < stage.log.index(("measure", 1))


def test_what_does_not_end_in_time_is_ended_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(job: Job, word: str) -> Any:
        is_stuck = word == "result" and job.case.batch[0] == 1
        return ("failed", "no word in time") if is_stuck else fine(job, word)

    stage, told = run(monkeypatch, answers)
    assert dict(told)[1] == "failed"
    assert stage.log.index(("kill", 1)) < stage.log.index(("measure", 2))
