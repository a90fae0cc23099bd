"""Reductions as results: which are accepted. Those that are not are in tests/net/refused.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, SUM, VAR, Result


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
