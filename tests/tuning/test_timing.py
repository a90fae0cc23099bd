"""Runs timed in turn: the longer one takes longer, and each runs as often as it should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epigemm.tuning.timing import CpuTimer, Effort, make_timer

SHORT, LONG = torch.randn(32, 32), torch.randn(512, 512)


def test_a_cpu_has_its_own() -> None:
    assert isinstance(make_timer(torch.device("cpu")), CpuTimer)


def test_so_many_calls_as_there_is_time_for() -> None:
    effort = Effort(rounds=3, min_ms=10.0, max_rounds=20)
    assert effort.calls(100.0) == 3 and effort.calls(0.01) == 20 and 3 < effort.calls(1.0) < 20


@pytest.mark.parametrize("rounds", [1, 5])
def test_the_longer_run_takes_longer(rounds: int) -> None:
    counts = [0, 0]

    def run(place: int, matrix: Tensor) -> Tensor:
        counts[place] += 1
        return matrix @ matrix

    timer = make_timer(torch.device("cpu"))
    runs = [lambda: run(0, SHORT), lambda: run(1, LONG)]
    short, long = timer.in_turn(runs, Effort(rounds=rounds, min_ms=0.0, max_rounds=rounds), 0.0)
    assert len(short) == len(long) == rounds and min(counts) >= rounds
    assert min(short) < min(long)
