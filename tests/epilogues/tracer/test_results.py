"""What a function returns: the step that all results share, and the programs of what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn
from epigemm.epilogues.tracer.results import (
    described,
    filled,
    structured,
    written,
)


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


def test_how_results_are_returned() -> None:
    a, b, c = (torch.ones(1) for _ in range(3))
    for returned, structure, text in (
        (a, 0, "a"),
        ((a,), (0,), "(a,)"),
        ([a, (b, c)], [0, (1, 2)], "[a, (b, c)]"),
        ((a, [b], c), (0, [1], 2), "(a, [b], c)"),
        ((a, [a], b), (0, [0], 1), "(a, [a], b)"),
    ):
        leaves, found = structured(returned)
        assert found == structure and type(found) is type(structure)
        assert filled(structure, leaves) == returned and type(filled(structure, leaves)) is type(returned)
        assert written(structure, ["a", "b", "c"]) == text
    assert described((a, [None, 1.0])) == "a tuple of Tensor, a list of NoneType, float"
    assert described({}) == "dict" and described(()) == "a tuple of nothing"
    assert structured(()) == ([()], 0), "no results: one that is no tensor"
