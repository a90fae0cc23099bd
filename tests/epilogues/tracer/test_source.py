"""The C++ text of a functor: numbers, the functions it calls, no name of the user's, and the user's line in errors."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import PerColumn, Scalar
from epigemm.epilogues.tracer.source import describe_compile_error, number_text, prelude
from tests.epilogues.tracer.functions import swish_clamp


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


def test_kernel_source_has_what_is_asked_for() -> None:
    traced = trace(swish_clamp)
    text = traced.kernel_source(
        (1, 1, 2, 2), ("operand", "apply_float16", "slope", "slope_double", "apply_double")
    )
    for name in ("int epigemm_operand(int", "float epigemm_apply(float", "float epigemm_slope(float"):
        assert text.count(f'extern "C" __device__ {name}') == 1
    assert "epigemm::Rounded(c0)" in text and text.count("double epigemm_slope_double(double acc") == 1
    assert "epigemm_slope" not in traced.kernel_source((1, 1, 2, 2))


def test_functions_with_a_near_form() -> None:
    """The near form passes on whether an argument was far. Only results of 16 bits have one, if they are short."""

    def wave(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.sin(acc) + torch.sinc(bias)

    def inexact(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.floor(torch.sin(acc + bias))

    def wrapped(acc: Tensor, bias: PerColumn) -> Tensor:
        return acc % bias + acc // bias + torch.fmod(acc, 0.5)

    for function, has_far in ((wave, "true"), (wrapped, "true"), (inexact, "false"), (swish_clamp, "false")):
        traced = trace(function)
        text = traced.kernel_source([1] * len(traced.operands), ("operand", "apply_bfloat16"))
        functions = text[text.rindex("epigemm_operand") :]
        assert functions.count(f"bool epigemm_has_far() {{\n  return {has_far};") == 1
        assert functions.count("float epigemm_apply_near(float acc,") == 1
        assert (", is_far).value" in functions) == (has_far == "true")
        for part in ("apply", "apply_double", "slope"):
            other = traced.kernel_source([1] * len(traced.operands), ("operand", part))
            assert "is_far" not in other[other.rindex("epigemm_operand") :]
    assert "sin(acc, is_far...)" in trace(wave).source and "sinc(c0, is_far...)" in trace(wave).source
    for name in ("remainder(acc, c0", "floor_div(acc, c0", "fmod(acc, T(0.5)"):
        assert f"math::{name}, is_far...)" in trace(wrapped).source
    assert "is_far" not in trace(swish_clamp).source


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
