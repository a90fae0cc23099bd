"""Operators that an epilogue may be made of: names of ATen's, and each is taken by a trace."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import Scalar
from epigemm.epilogues.tracer import aten
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
