"""Operators that an epilogue may be made of: names of ATen's, each taken by a trace; reductions as results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn, Scalar
from epigemm.epilogues.tracer import aten
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, SUM, VAR, Result
from tests.support.untyped import torch as untyped


@pytest.mark.parametrize("name", [*aten.UNARY, *aten.BINARY])
def test_a_trace_takes_it(name: str) -> None:
    overload = getattr(torch.ops.aten, name)

    def unary(acc: Tensor) -> Any:
        return overload(acc)

    def binary(acc: Tensor) -> Any:
        return overload(acc, acc + 1.5)

    function = unary if name in aten.UNARY else binary
    acc = torch.linspace(0.1, 2.9, 8, dtype=torch.float64).view(2, 4)  # for some of them beyond their domain
    torch.testing.assert_close(trace(function).reference(acc), function(acc), equal_nan=True)


def test_operators_of_python() -> None:
    """On symbolic numbers as on tensors."""

    def computes(acc: Tensor, a: Scalar, b: Scalar) -> Any:
        number = operator.sub(operator.mul(operator.neg(a), b), operator.truediv(a, operator.add(b, 7.0)))
        other = operator.add(operator.pow(operator.abs(b), 2), operator.mod(a, 3.0))
        return acc * number + untyped.sym_max(other, a) - untyped.sym_min(b, a)

    acc = torch.randn(3, 4, dtype=torch.float64)
    for a, b in ((0.5, -2.0), (4.0, 3.0)):
        torch.testing.assert_close(trace(computes).reference(acc, a, b), computes(acc, a, b))


# A trace gives a scalar a value, at which these two have none.
@pytest.mark.parametrize("name", sorted({*aten.symbolic_functions().values()} - {"acos", "asin"}))
def test_functions_of_symbolic_numbers(name: str) -> None:
    function = next(each for each, of in aten.symbolic_functions().items() if of == name)

    def computes(acc: Tensor, s: Scalar) -> Any:
        return acc * function(s)

    acc = torch.randn(3, 4, dtype=torch.float64)
    expected = acc * getattr(torch, name)(torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(trace(computes).reference(acc, 0.3), expected)


# --- reductions as results; those that are refused: net/refused.txt ---------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda acc: acc.sum(0), Result(0.0, SUM)),
        (lambda acc: torch.sum(acc, dim=1), Result(0.0, SUM, 1)),
        (lambda acc: acc.sum(-2), Result(0.0, SUM)),
        (lambda acc: acc.sum((-1,), keepdim=True), Result(0.0, SUM, 1, keeps_axis=True)),
        (lambda acc: acc.mean(0), Result(0.0, MEAN)),
        (lambda acc: torch.amax(acc, 1), Result(0.0, AMAX, 1)),
        (lambda acc: acc.amin(dim=(0,)), Result(0.0, AMIN)),
        (lambda acc: acc.var(0), Result(0.0, VAR, correction=1.0)),
        (lambda acc: acc.var(0, unbiased=False), Result(0.0, VAR)),
        (lambda acc: torch.var(acc, 1, correction=2), Result(0.0, VAR, 1, correction=2.0)),
    ],
)
def test_one(function: Callable[..., Any], expected: Result) -> None:
    found = trace(function)
    assert isinstance(found, TracedResults)
    assert [each.about for each in found.results.results] == [expected]
    assert found.results.structure == 0


def test_beside_fp64_it_is_of_fp32_where_the_function_says_so() -> None:
    found = trace(lambda acc: (acc.float().sum(0), acc.sum(0), torch.var_mean(acc.float(), 1)))
    assert isinstance(found, TracedResults)
    assert [each.is_fp32 for each in found.results.results] == [True, False, True, True]


def test_a_reduction_that_nobody_returns_is_none() -> None:
    def unused(acc: Tensor) -> Tensor:
        acc.sum(0)
        return acc * 2.0

    assert torch.equal(trace(unused).reference(torch.ones(2, 2)), torch.full((2, 2), 2.0))


def test_forms_return_the_same() -> None:
    """As many results, but of another axis."""

    def other(acc: Tensor, bias: PerColumn | None = None) -> Any:
        return (acc, acc.sum(0)) if bias is None else (acc + bias, acc.sum(1))

    with pytest.raises(TypeError, match="without bias it returns other results than with all operands"):
        trace(other)
