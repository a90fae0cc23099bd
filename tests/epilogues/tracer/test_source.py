"""The C++ text of a functor: numbers, the functions it calls, no name of the user's, and the user's line in errors."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
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
