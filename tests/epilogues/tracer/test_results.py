"""What a function returns: the step that all results share, and the programs of what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn


def traced(function: Callable[..., Any]) -> TracedResults:
    found = trace(function)
    assert isinstance(found, TracedResults)
    return found


def test_steps_that_are_the_same_are_one() -> None:
    def function(acc: Tensor, bias: PerColumn) -> Any:
        first, second = torch.tanh(acc + bias), torch.tanh(acc + bias)
        return (first * first).sum(0), (second * second).sum(1), acc * 0.0, acc * -0.0

    made = traced(function).results
    assert [step.op for step in made.steps] == ["add", "tanh", "mul", "mul", "mul"]
    assert made.results[0].value == made.results[1].value and made.results[2] != made.results[3]
