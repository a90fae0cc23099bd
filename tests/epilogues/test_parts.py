"""Functions with several results, taken apart: which matrices, of what, and which reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.kinds import Matrix, PerColumn
from epigemm.epilogues.parts import Parts, Reduction, take_apart
from epigemm.epilogues.tracer.results import AMAX, MEAN, SUM, VAR


def parts(function: Callable[..., Any], *, is_exact: bool) -> Parts:
    found = trace(function)
    assert isinstance(found, TracedResults)
    return take_apart(found, is_exact=is_exact)


def about(found: Parts) -> list[tuple[str, tuple[int, ...], bool, int]]:
    """Of each matrix its epilogue's name, its operands, whether it is in fp32, and what it is a function of."""
    return [
        (each.traced.name if each.traced else "", each.places, each.is_wide, each.source)
        for each in found.matrices
    ]


def function(acc: Tensor, bias: PerColumn, other: Matrix) -> Any:
    z = acc + bias
    y = F.gelu(z) * other
    return y, z, y.sum(0), (z * z).sum(0), (z * z).amax(1), z.float()


def test_matrices_and_reductions() -> None:
    found = parts(function, is_exact=True)
    assert about(found) == [
        ("function_shared", (0,), False, 0),
        ("function_result0", (1,), False, 0),
        ("function_result3", (), False, 0),
    ]
    assert found.reductions == [
        Reduction(1, SUM, 0, 0.0),
        Reduction(2, SUM, 0, 0.0),
        Reduction(2, AMAX, 1, 0.0),
    ]
    assert found.sources == [1, 0, 0, 1, 2, 0]


def test_in_16_bits_what_is_not_stored_is_in_fp32() -> None:
    """A reduction reads a stored matrix as it is stored; others are computed in fp32, from the product alone."""
    found = parts(function, is_exact=False)
    assert about(found) == [
        ("", (), False, 0),
        ("function_result0", (0, 1), False, 0),
        ("function_result1", (0,), False, 0),
        ("", (), True, 0),
        ("function_result5", (0,), True, 3),
        ("function_result3", (0,), True, 3),
    ]
    assert found.sources == [1, 2, 0, 1, 2, 4]
    assert [each.matrix for each in found.reductions] == [1, 5, 5]


def test_a_mean_is_that_of_var_mean_only_where_it_was_asked_for() -> None:
    def both(acc: Tensor) -> Any:
        return *torch.var_mean(acc, 0), acc.mean(0), acc.mean(1), acc.var(0, correction=0)

    found = parts(both, is_exact=True)
    assert found.reductions == [
        Reduction(0, VAR, 0, 1.0),
        Reduction(0, MEAN, 0, 0.0),
        Reduction(0, MEAN, 1, 0.0),
        Reduction(0, VAR, 0, 0.0),
    ]
    assert found.sources == [0, 0, 1, 2, 3] and about(found) == [("", (), False, 0)]


def test_constants_are_told_apart() -> None:
    def constants(acc: Tensor) -> Any:
        nan = float("nan")
        return (
            torch.full_like(acc, 0.0),
            torch.full_like(acc, -0.0),
            torch.full_like(acc, nan),
            torch.full_like(acc, nan),
        )

    found = parts(constants, is_exact=True)
    assert found.sources == [1, 2, 3, 3] and len(found.matrices) == 4


def test_what_is_stored_first() -> None:
    stored = parts(lambda acc: (acc, acc.sum(0)), is_exact=True)
    alone = parts(lambda acc: [acc.sum(0)], is_exact=True)
    results = [trace(each) for each in (lambda acc: (acc, acc.sum(0)), lambda acc: [acc.sum(0)])]
    assert all(isinstance(each, TracedResults) for each in results)
    assert stored.stores_shared(results[0].results.results)  # type: ignore[union-attr]
    assert not alone.stores_shared(results[1].results.results)  # type: ignore[union-attr]


def test_long_names_are_cut() -> None:
    def a_function_with_a_name_that_is_longer_than_all_names_that_kernels_have(acc: Tensor) -> Any:
        return torch.tanh(acc), acc * 2.0

    found = parts(a_function_with_a_name_that_is_longer_than_all_names_that_kernels_have, is_exact=True)
    assert [len(each.traced.name) for each in found.matrices if each.traced] == [56, 56]
