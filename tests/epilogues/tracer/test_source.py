"""The C++ text of a functor: its numbers, functions and primitives, and the line of the user's that errors name."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import Matrix, PerColumn, Scalar
from epigemm.epilogues.tracer import aten, steps
from epigemm.epilogues.tracer.source import describe_compile_error, is_long, number_text, prelude, primitives
from tests.csrc.test_functors import lengthy
from tests.epilogues.tracer.test_trace import swish_clamp
from tests.support.formulas import formula
from tools import cost_table


def test_source_holds_no_name_of_the_users() -> None:
    def odd(acc: Tensor, operator: PerColumn, delete: Scalar) -> Any:
        return acc * operator + delete

    source = trace(odd).source
    assert "delete" not in source and "operator" not in source
    assert re.search(r"const T v0 = acc \* c0;\n    const T v1 = v0 \+ s0;\n    return v1;", source)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "T(0.5)"),
        (-0.0, "T(-0.0)"),
        (0.1, "T(0.1)"),
        (1 / 3, "T(0x1.5555555555555p-2)"),
        (math.inf, "T(epigemm::math::infinity())"),
        (-math.inf, "T(-epigemm::math::infinity())"),
        (math.nan, "T(epigemm::math::not_a_number())"),
        (1e300, "T(0x1.7e43c8800759cp+996)"),
    ],
)
def test_numbers_are_written_exactly(value: float, text: str) -> None:
    assert number_text(value) == text


def test_prelude_is_one_text() -> None:
    lines = prelude().splitlines()
    assert not [line for line in lines if line.startswith("#include") and '"' in line]
    depth = 0  # standard headers stand inside of a condition that NVRTC does not meet
    for line in lines:
        depth += line.startswith("#if")
        depth -= line.startswith("#endif")
        assert not line.startswith("#include <") or depth >= 1, line


def test_compile_errors_name_the_users_line() -> None:
    traced = trace(swish_clamp)
    text = traced.kernel_source((1, 1, 2, 2))
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "clamp(v" in line)
    log = f'user.cu({number}): error: identifier "x" is undefined\n\n1 error detected'
    line = inspect.getsourcelines(swish_clamp)[1] + inspect.getsource(swish_clamp).split("\n").index(
        next(part for part in inspect.getsource(swish_clamp).split("\n") if "torch.clamp" in part)
    )
    message = describe_compile_error(traced.program, text, log)
    assert message == f'{inspect.getsourcefile(swish_clamp)}:{line}: identifier "x" is undefined'


# --- the primitives of a functor, of which its cost is made -----------------------------------------------------------


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


# --- the functions that kernels call; csrc/test_functors has their values ---------------------------------------------


def text_of(of: Traced, part: str) -> str:
    text = of.kernel_source([1] * len(of.operands), ("operand", part))
    return text[text.index("struct Functor") :]


def test_what_is_long() -> None:
    """By the instructions of the arithmetic that runs: a result of 16 bits has shorter functions."""
    mish, of_many = trace(lambda acc: F.mish(acc)), trace(lengthy)
    assert is_long(mish.program, mish.kinds, "apply") and is_long(of_many.program, of_many.kinds, "apply")
    assert not is_long(mish.program, mish.kinds, "apply_bfloat16")


def test_a_second_value_has_functions_of_its_own() -> None:
    """Each value by the functions that its own errors allow, and both read the operands of either."""

    def wave(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return torch.sin(acc + bias)

    def gelu(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return F.gelu(acc) + other

    plain, of_wave = trace(gelu), trace(wave)
    both = Traced("both", plain.operands, plain.program, stored=of_wave.program)
    assert both.source.count("struct ") == 2 and both.digest != plain.digest
    for part, number in (("apply", "float, false"), ("apply_float16", "epigemm::Rounded, true")):
        text = text_of(both, part)
        assert text.count("return 1;") == 2
        assert f"using stored = epigemm::open::Applied<StoredFunctor, {number}, 0, 10>;" in text
        assert "using stored = epigemm::open::Nothing;" in text_of(plain, part)
    assert "stored" not in text_of(both, "slope")
