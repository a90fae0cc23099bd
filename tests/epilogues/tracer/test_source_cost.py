"""The primitives of a functor, of which the planner's cost of it is made, and the table of their costs."""

from __future__ import annotations

import pytest

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.tracer import aten, steps
from epigemm.epilogues.tracer.source import primitives
from tests.support.formulas import formula
from tools import cost_table


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("acc, bias: PerColumn -> torch.relu(acc + bias) ** 2", "relu,mul"),  # the bias is every kernel's
        ("acc, bias: PerColumn -> torch.sigmoid(acc + bias)", "sigmoid"),
        ("acc -> F.gelu(acc)", "gelu"),
        ("acc, bias: PerColumn -> F.gelu(acc) * torch.exp(bias)", "gelu,exp,mul"),
        ("acc, row: PerRow -> acc / row", "div"),
        ("acc, scale: Scalar -> acc / scale", "div_by_scalar"),
        ("acc, a: Scalar, b: Scalar -> acc * (a / b) ** 3.5", "mul"),
        ("acc -> torch.pow(acc, 0.5)", "sqrt"),
        ("acc, exponent: Scalar -> torch.pow(acc, exponent)", "pow"),
        (
            "acc, bias: PerColumn -> torch.exp(acc + bias) ** 4 + (acc + bias).half().float()",
            "add,exp,pow,add,copy,to_half,add",
        ),
    ],
)
def test_primitives(function: str, expected: str) -> None:
    made = trace(formula(function))
    assert sorted(primitives(made.program, made.kinds).split(",")) == sorted(expected.split(","))


def test_the_table_has_every_primitive() -> None:
    ops = {*aten.UNARY, *aten.BINARY, *aten.PREDICATES, *steps.KEPT, *steps._WITH_NUMBERS}
    spelled_otherwise = {"rsub", "nan_to_num", "logical_not", "floor_divide"}
    more = {"floor_div", "trunc_div", "div_by_scalar", "to_half", "to_bfloat16", "neg", "copy", "highest"}
    assert (ops | more) - spelled_otherwise <= cost_table.read().keys()
