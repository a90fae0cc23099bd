"""What a function returns: the step that all results share, and the programs of what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow
from epigemm.epilogues.tracer.program import BOOL, HALF, REAL, Program, Ref, Step
from epigemm.epilogues.tracer.reference import reference_module
from epigemm.epilogues.tracer.results import (
    AMAX,
    MEAN,
    STORE,
    SUM,
    VAR,
    Result,
    Results,
    described,
    filled,
    narrowed,
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


def test_the_programs_on_both_sides_are_the_function(rng: torch.Generator) -> None:
    def function(acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix) -> tuple[Tensor, Tensor, Tensor]:
        z = F.silu(acc + bias) * row
        return torch.where(z > 0, z, other), z - 2.0, other * bias

    made = traced(function).results
    shared = made.shared(is_exact=True)
    acc, bias, row, other = (
        torch.randn(size, generator=rng, dtype=torch.float64) for size in ((5, 4), (4,), (5, 1), (5, 4))
    )
    operands = (bias, row, other)
    (first,), places = narrowed(made.program(Ref(shared)))
    assert places == (0, 1) and first.operands == 2
    z = reference_module(first)(acc, *(operands[place] for place in places))
    torch.testing.assert_close(z, F.silu(acc + bias) * row)
    for result, want in zip(made.results, function(acc, bias, row, other), strict=True):
        (rest,), places = narrowed(made.rest(result.value, shared))
        assert rest.reads() - {0} == set(range(1, rest.operands + 1))
        found = reference_module(rest)(z, *(operands[place] for place in places))
        torch.testing.assert_close(found, want)
    assert narrowed(Program(2, (), Ref(0))) == ([Program(0, (), Ref(0))], ())
    of_second = Program(2, (Step("add", (B, 1.0), REAL, ""),), Ref(3))
    assert narrowed(of_second) == ([Program(1, (Step("add", (A, 1.0), REAL, ""),), Ref(2))], (1,))
    both = [Program(1, (), Ref(0)), Program(1, (Step("add", (A, 1.0), REAL, ""),), Ref(2))]
    assert narrowed(Program(2, (), Ref(0)), of_second) == (both, (1,))


def test_steps_that_are_the_same_are_one() -> None:
    def function(acc: Tensor, bias: PerColumn) -> Any:
        first, second = torch.tanh(acc + bias), torch.tanh(acc + bias)
        return (first * first).sum(0), (second * second).sum(1), acc * 0.0, acc * -0.0

    made = traced(function).results
    assert [step.op for step in made.steps] == ["add", "tanh", "mul", "mul", "mul"]
    assert made.results[0].value == made.results[1].value and made.results[2] != made.results[3]


def test_what_a_result_is() -> None:
    def function(acc: Tensor) -> Any:
        z = acc * 2
        return z, z.float(), [z.sum(0), *torch.var_mean(z, -1, correction=0)], z.amax(-2, keepdim=True)

    made = traced(function).results
    assert made.structure == (0, 1, [2, 3, 4], 5) and not made.is_one_matrix
    about = [each.about for each in made.results]
    assert about == [
        Result(0.0),
        Result(0.0, is_fp32=True),
        Result(0.0, SUM),
        Result(0.0, VAR, 1, correction=0.0),
        Result(0.0, MEAN, 1, comes_with_var=True),
        Result(0.0, AMAX, 0, keeps_axis=True),
    ]
    shapes = [each.shape((2, 3), 7) for each in made.results]
    assert shapes == [(2, 3, 7), (2, 3, 7), (7,), (2, 3), (2, 3), (1, 7)]
    assert Result(0.0, SUM, 1, keeps_axis=True).shape((2, 3), 7) == (2, 3, 1)
    assert str(made.results[0]) == "a matrix, [..., N], x's dtype"
    assert str(made.results[1]) == "a matrix, [..., N], fp32"
    assert str(made.results[3]) == "var of each row, [...], fp32 (fp64 beside fp64)"
    assert all(each.is_stored == (each.kind == STORE) for each in made.results)
    # The rounding to fp32 is the result's, not a step of its own.
    assert made.results[1].value == made.results[0].value


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
