"""Runs timed in turn: the longer one takes longer, each runs as often as it should, and late calls are repeated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.harness.records import Timing
from benchmarks.harness.timing import _REPEATS, CpuTimer, Effort, Late, Run, make_timer

SHORT, LONG = torch.randn(32, 32), torch.randn(512, 512)


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


@pytest.mark.parametrize("late_for", [0, 1, 9], ids=["never", "once", "always"])
def test_a_late_call_is_repeated_behind_a_longer_spin(late_for: int) -> None:
    """And counted in the record if it stays late."""
    spins = list[float]()

    class Scripted(CpuTimer):
        def times(self, runs: Sequence[Run], spin_us: float) -> list[tuple[bool, float]]:
            spins.append(spin_us)
            return [(len(spins) <= late_for, 5.0 if len(spins) <= late_for else 1.0) for _ in runs]

    (found,) = Scripted(torch.device("cpu")).round([lambda: SHORT], host_us=5.0)
    repeats = min(late_for, _REPEATS)
    assert spins == [27.5 * 2**each for each in range(1 + repeats)]
    assert isinstance(found, Late) == (late_for > repeats) and found == (5.0 if late_for > repeats else 1.0)
    assert Timing.of([found]).late == int(late_for > repeats)
