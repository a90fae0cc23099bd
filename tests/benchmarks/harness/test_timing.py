"""Runs timed in turn: each as often as it should."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from benchmarks.harness.timing import Effort, in_turn, make_timer


@pytest.mark.parametrize(
    ("effort", "expected"),
    [(Effort(1, 0.0, 1), 1), (Effort(5, 0.0, 5), 5), (Effort(3, 1e9, 7), 7), (Effort(2, 0.0, 9), 2)],
)
def test_each_runs_as_often_as_it_should(effort: Effort, expected: int) -> None:
    counts = Counter[str]()

    def run(name: str) -> Tensor:
        counts[name] += 1
        return torch.empty(0)

    timer = make_timer(torch.device("cpu"))
    found = in_turn(timer, [lambda: run("a"), lambda: run("b")], effort, 0.0)
    assert [len(each) for each in found] == [expected] * 2 and counts == {"a": expected, "b": expected}
    assert in_turn(timer, [], effort, 0.0) == []
