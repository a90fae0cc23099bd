"""Waves of processes: order, alone while one measures, time limits. No process is started here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models.jobs import INFERENCE, Case, Job
from benchmarks.models.pool import Pool, Worker

CPU = torch.device("cpu")
JOBS = [Job(Case("nerf", "bf16", INFERENCE, (batch,)), "fuse") for batch in range(1, 8)]
Answer = Callable[[Job, str], Any]


class Fake(Worker):
    """Logs what happens, in order; `answers` says what a process says to a word."""

    def __init__(self, answers: Answer, log: list[tuple[str, int]], job: Job) -> None:
        self.answers, self.seen, self.job, self.outcome = answers, log, job, ("", None)
        self.tell("start")

    def tell(self, word: str) -> None:
        self.seen.append((word, self.job.case.batch[0]))

    def wait(self, word: str, until: float) -> None:
        said = self.answers(self.job, word)
        if isinstance(said, tuple) and not self.has_ended:
            self.outcome = said
        self.tell(word)

    def kill(self) -> None:
        self.tell("kill")

    def join(self) -> None:
        self.tell("gone")


def run(answers: Answer) -> tuple[list[tuple[str, int]], list[tuple[int, str]]]:
    """What happened, and what was told."""
    log, told = list[tuple[str, int]](), list[tuple[int, str]]()

    def tell(job: Job, what: str, value: Any) -> None:
        told.append((job.case.batch[0], what))

    Pool([CPU], tell, 60.0, lambda job, device: Fake(answers, log, job), size=3).run(JOBS)
    assert all(log.count(("start", number)) == 1 and ("gone", number) in log for number in range(1, 8))
    return log, told


def fine(job: Job, word: str) -> Any:
    return ("result", {}) if word == "result" else None


def test_waves_in_order() -> None:
    log, told = run(fine)
    assert told == [(number, "result") for number in range(1, 8)]
    # The next wave loads before one of this measures, and prepares after all of this have.
    for first, following in ((1, 4), (4, 7)):
        assert log.index(("up", following)) < log.index(("measure", first))
        assert log.index(("measure", first + 2)) < log.index(("prepare", following))
    assert log.index(("prepare", 3)) < log.index(("ready", 1))
    # Processes end when all of their wave have measured.
    assert log.index(("measure", 3)) < log.index(("kill", 1)) < log.index(("prepare", 4))


def test_what_fails_or_is_skipped_does_not_measure() -> None:
    def answers(job: Job, word: str) -> Any:
        number = job.case.batch[0]
        if word == "ready" and number in (2, 3):
            return ("failed", "why") if number == 2 else ("skipped", "why")
        return fine(job, word)

    log, told = run(answers)
    assert dict(told) == {1: "result", 2: "failed", 3: "skipped", **dict.fromkeys(range(4, 8), "result")}
    assert ("measure", 2) not in log and ("measure", 3) not in log
    assert max(log.index(("kill", number)) for number in (2, 3)) < log.index(("measure", 1))


def test_what_does_not_end_in_time_is_ended_before_the_next() -> None:
    def answers(job: Job, word: str) -> Any:
        is_stuck = word == "result" and job.case.batch[0] == 1
        return ("failed", "no word in time") if is_stuck else fine(job, word)

    log, told = run(answers)
    assert dict(told)[1] == "failed"
    assert log.index(("kill", 1)) < log.index(("measure", 2))
