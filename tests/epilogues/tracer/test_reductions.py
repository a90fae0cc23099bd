"""Reductions as results: which are accepted, and the line and words of those that are not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import PerColumn, PerRow
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, SUM, VAR, Result

ALONG = "supported are sum, mean, amax, amin, var and var_mean of \\[M, N\\] along one axis, as results alone"


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


def is_read(acc: Tensor) -> Any:
    return acc - acc.mean(0)


def is_read_behind_a_result(acc: Tensor) -> Any:
    total = acc.sum(0)
    return (
        total,
        total * 2.0,
    )


def deviation(acc: Tensor) -> Any:
    return acc, acc.std(0)


def of_a_pair(acc: Tensor) -> Any:
    variance, _ = torch.var_mean(acc, 0)
    return acc, torch.rsqrt(variance + 1e-5)


def is_cast(acc: Tensor) -> Any:
    return acc, acc.sum(0).half()


def of_all(acc: Tensor) -> Any:
    return acc, acc.sum()


def of_both_axes(acc: Tensor) -> Any:
    return acc, acc.mean((0, 1))


def of_a_vector(acc: Tensor, bias: PerColumn) -> Any:
    return acc, bias.sum(0)


def of_a_row(acc: Tensor, row: PerRow) -> Any:
    return acc + row, row.sum(0)


def of_a_reduction(acc: Tensor) -> Any:
    return acc.sum(0, keepdim=True).sum(1)


def of_booleans(acc: Tensor) -> Any:
    return acc, (acc > 0).sum(0)


def of_fp16(acc: Tensor) -> Any:
    return acc, acc.half().sum(0)


def with_a_dtype(acc: Tensor) -> Any:
    return acc, acc.sum(0, dtype=torch.float64)


def another(acc: Tensor) -> Any:
    return acc, acc.prod(0)


def largest(acc: Tensor) -> Any:
    return acc, acc.max(0).values


def norm(acc: Tensor) -> Any:
    return acc, acc.norm(dim=1)


def softmax(acc: Tensor) -> Any:
    return acc, torch.softmax(acc, 1)


def in_fp16(acc: Tensor) -> Any:
    return acc, acc.half()


def a_vector(acc: Tensor, bias: PerColumn) -> Any:
    return acc + bias, bias


def of_comparison(acc: Tensor) -> Any:
    return acc, acc > 0


def a_dictionary(acc: Tensor) -> Any:
    return {"y": acc, "z": acc}


def a_number_among_them(acc: Tensor) -> Any:
    return acc, 1.0


def nothing_at_all(acc: Tensor) -> Any:
    return ()


def a_pair_with_indices(acc: Tensor) -> Any:
    return acc, acc.max(0)


def of_its_size(acc: Tensor) -> Any:
    return acc, acc.sum(0) if acc.shape[0] > 1 else acc.mean(0)


def as_many_as_rows(acc: Tensor) -> Any:
    return (acc, acc) if acc.shape[0] == 1 else (acc, acc * 2)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (
            is_read,
            NotImplementedError,
            f"mean is a reduction, and its result is read; {ALONG}: read it in a second call",
        ),
        (is_read_behind_a_result, NotImplementedError, "sum is a reduction, and its result is read"),
        (deviation, NotImplementedError, "var is a reduction, and its result is read"),
        (of_a_pair, NotImplementedError, "var_mean is a reduction, and its result is read"),
        (is_cast, NotImplementedError, "sum is a reduction, and its result is read"),
        (of_all, NotImplementedError, f"sum is a reduction of all elements; {ALONG}"),
        (of_both_axes, NotImplementedError, f"mean is a reduction of all elements; {ALONG}"),
        (of_a_vector, NotImplementedError, f"sum is a reduction of a tensor that is not \\[M, N\\]; {ALONG}"),
        (of_a_row, NotImplementedError, "sum is a reduction of a tensor that is not \\[M, N\\]"),
        (of_a_reduction, NotImplementedError, "sum is a reduction"),
        (
            of_booleans,
            NotImplementedError,
            "sum is a reduction of torch.bool; accepted are numbers, as of torch.where",
        ),
        (of_fp16, NotImplementedError, "sum is a reduction of torch.float16; .* write float\\(\\) before it"),
        (with_a_dtype, NotImplementedError, "sum is a reduction with a dtype; accepted is none"),
        (another, NotImplementedError, f"prod is a reduction; {ALONG}"),
        (largest, NotImplementedError, "max is a reduction"),
        (norm, NotImplementedError, "linalg_vector_norm is a reduction"),
        (softmax, NotImplementedError, "_softmax is a reduction"),
        (
            in_fp16,
            NotImplementedError,
            "its result 1 is of torch.float16; a matrix among several results has x's",
        ),
        (a_vector, NotImplementedError, "its result 1 has the shape \\[N\\], not \\[M, N\\]"),
        (of_comparison, NotImplementedError, "its result 1 is of torch.bool, not floating point"),
        (
            a_dictionary,
            TypeError,
            "it returns dict; an epilogue returns a tensor, or a tuple or list of tensors",
        ),
        (a_number_among_them, TypeError, "it returns a tuple of Tensor, float; an epilogue returns"),
        (nothing_at_all, TypeError, "it returns a tuple of nothing"),
        (a_pair_with_indices, TypeError, "it returns a tuple of Tensor, max"),
        (of_its_size, NotImplementedError, "the shape of a tensor decides"),
        (as_many_as_rows, NotImplementedError, "the shape of a tensor decides"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused(function: Callable[..., Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        trace(function)
    first = function.__code__.co_firstlineno
    last = first + len(inspect.getsource(function).rstrip().split("\n")) - 1
    named = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert named is not None and first < int(named[1]) <= last, str(caught.value)


def test_the_line_is_that_of_the_reader() -> None:
    with pytest.raises(NotImplementedError) as caught:
        trace(is_read_behind_a_result)
    assert f":{is_read_behind_a_result.__code__.co_firstlineno + 4})" in str(caught.value)


def test_a_reduction_that_nobody_returns_is_none() -> None:
    def unused(acc: Tensor) -> Tensor:
        acc.sum(0)
        return acc * 2.0

    assert torch.equal(trace(unused).reference(torch.ones(2, 2)), torch.full((2, 2), 2.0))


def test_forms_return_the_same() -> None:
    def other(acc: Tensor, bias: PerColumn | None = None) -> Any:
        return (acc, acc.sum(0)) if bias is None else (acc + bias, acc.sum(1))

    with pytest.raises(TypeError, match="without bias it returns other results than with all operands"):
        trace(other)
