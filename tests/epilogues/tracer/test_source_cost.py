"""The primitives of a functor, of which the planner's cost of it is made, and the table of their costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import PerColumn, PerRow, Scalar
from epigemm.epilogues.tracer import aten, steps
from epigemm.epilogues.tracer.source import primitives
from tools import cost_table


def plain(acc: Tensor, bias: PerColumn) -> Tensor:
    return torch.relu(acc + bias) ** 2


def sigmoid(acc: Tensor, bias: PerColumn) -> Tensor:
    return torch.sigmoid(acc + bias)


def gelu(acc: Tensor) -> Tensor:
    return F.gelu(acc)


def both(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc) * torch.exp(bias)


def by_row(acc: Tensor, row: PerRow) -> Tensor:
    return acc / row


def by_scalar(acc: Tensor, scale: Scalar) -> Tensor:
    return acc / scale


def of_scalars(acc: Tensor, a: Scalar, b: Scalar) -> Tensor:
    scale: float = (a / b) ** 3.5
    return acc * scale


def root(acc: Tensor) -> Tensor:
    return torch.pow(acc, 0.5)


def power(acc: Tensor, exponent: Scalar) -> Tensor:
    return torch.pow(acc, exponent)


def fourth(acc: Tensor, bias: PerColumn) -> Tensor:
    return torch.exp(acc + bias) ** 4 + (acc + bias).half().float()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, "relu,mul"),  # the bias is every kernel's
        (sigmoid, "sigmoid"),
        (gelu, "gelu"),
        (both, "gelu,exp,mul"),
        (by_row, "div"),
        (by_scalar, "div_by_scalar"),
        (of_scalars, "mul"),
        (root, "sqrt"),
        (power, "pow"),
        (fourth, "add,exp,pow,add,copy,to_half,add"),
    ],
)
def test_primitives(function: Callable[..., Tensor], expected: str) -> None:
    made = trace(function)
    assert sorted(primitives(made.program, made.kinds).split(",")) == sorted(expected.split(","))


def test_the_table_has_every_primitive() -> None:
    ops = {*aten.UNARY, *aten.BINARY, *aten.PREDICATES, *steps.KEPT, *steps._WITH_NUMBERS}
    spelled_otherwise = {"rsub", "nan_to_num", "logical_not", "floor_divide"}
    more = {"floor_div", "trunc_div", "div_by_scalar", "to_half", "to_bfloat16", "neg", "copy", "highest"}
    assert (ops | more) - spelled_otherwise <= cost_table.read().keys()
