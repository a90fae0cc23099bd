"""What a function returns: the step that all results share, and the programs of what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn
from epigemm.epilogues.tracer.program import BOOL, HALF, REAL, Ref, Step
from epigemm.epilogues.tracer.results import (
    AMAX,
    SUM,
    Result,
    Results,
    described,
    filled,
    structured,
    written,
)

ACC, A, B = Ref(0), Ref(1), Ref(2)


def results(*values: Result | Ref, steps: tuple[Any, ...]) -> Results:
    """Of two operands; steps as (operator, inputs) or (operator, inputs, kind)."""
    made = tuple(Step(each[0], each[1], each[2] if len(each) > 2 else REAL, "") for each in steps)
    every = tuple(each if isinstance(each, Result) else Result(each) for each in values)
    return Results(2, made, every, tuple(range(len(every))))


def traced(function: Callable[..., Any]) -> TracedResults:
    found = trace(function)
    assert isinstance(found, TracedResults)
    return found


BIASED = ("add", (ACC, A))  # 3


@pytest.mark.parametrize(
    ("values", "steps", "exact", "in_16_bits"),
    [
        # z and what follows it: z; in 16 bits gelu(z) is not computed from a rounded z.
        ((Ref(3), Ref(4)), (BIASED, ("gelu", (Ref(3),))), 3, 0),
        # What is stored is shared, if others read it alone.
        ((Ref(4), Result(Ref(4), SUM)), (BIASED, ("gelu", (Ref(3),))), 4, 4),
        # What is not stored would be rounded, if it were not the product.
        ((Result(Ref(4), SUM), Result(Ref(4), AMAX)), (BIASED, ("gelu", (Ref(3),))), 4, 0),
        ((Result(Ref(4), is_fp32=True),), (BIASED, ("gelu", (Ref(3),))), 4, 0),
        ((Ref(4), Result(Ref(4), is_fp32=True)), (BIASED, ("gelu", (Ref(3),))), 4, 0),
        ((Ref(4),), (BIASED, ("mul", (Ref(3), ACC))), 4, 4),
        ((Ref(4), Ref(5)), (BIASED, ("mul", (Ref(3), ACC)), ("relu", (Ref(3),))), 0, 0),
        ((ACC, Ref(3)), (BIASED,), 0, 0),
        # Two ways that meet: what comes after them, or what comes before.
        ((Ref(6),), (BIASED, ("relu", (Ref(3),)), ("tanh", (Ref(3),)), ("mul", (Ref(4), Ref(5)))), 6, 6),
        ((Ref(4), Ref(5)), (BIASED, ("relu", (Ref(3),)), ("tanh", (Ref(3),))), 3, 0),
        # A result that does not depend on the product has no say; an operand is no way.
        ((Ref(3), B), (BIASED,), 3, 3),
        ((B, 1.0), (), 0, 0),
        ((Ref(4), Result(Ref(3), SUM)), (("mul", (ACC, B)), ("add", (Ref(3), B))), 3, 0),
        # No boolean is stored, and no number of fp16 in bf16.
        (
            (Ref(4), Ref(5)),
            (("lt", (ACC, A), BOOL), ("where", (Ref(3), A, B)), ("where", (Ref(3), B, A))),
            0,
            0,
        ),
        (
            (Result(Ref(4), SUM), Result(Ref(5), SUM)),
            (("copy", (ACC,), HALF), ("relu", (Ref(3),)), ("abs", (Ref(3),))),
            3,
            0,
        ),
        # A step that nobody reads counts for nothing.
        ((Ref(4), Ref(5)), (BIASED, ("relu", (Ref(3),)), ("tanh", (Ref(3),)), ("abs", (ACC,))), 3, 0),
    ],
)
def test_the_shared_step(values: Any, steps: Any, exact: int, in_16_bits: int) -> None:
    every = [Result(value) if isinstance(value, float) else value for value in values]
    made = results(*every, steps=steps)
    assert made.shared(is_exact=True) == exact
    assert made.shared(is_exact=False) == in_16_bits


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
