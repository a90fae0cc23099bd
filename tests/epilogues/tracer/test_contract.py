"""The functor of four elements: where it is not inlined. csrc/test_functors has its values."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.tracer import cost
from tests.csrc.test_functors import lengthy


def short(acc: torch.Tensor, bias: epigemm.PerColumn) -> torch.Tensor:
    return torch.relu(acc + bias)


def long_and_far(acc: torch.Tensor, row: epigemm.PerRow) -> torch.Tensor:
    return torch.sin(acc) * torch.erfc(acc * row) + torch.sinh(torch.erfc(acc))


def traced(function: object) -> Traced:
    found = trace(function)  # type: ignore[call-overload]
    assert isinstance(found, Traced)
    return found


def text_of(function: object, part: str) -> str:
    of = traced(function)
    text = of.kernel_source([1] * len(of.operands), ("operand", part))
    return text[text.index("struct Functor") :]


@pytest.mark.parametrize("part", ["apply", "apply_float16", "apply_bfloat16"])
def test_a_long_functor_is_not_inlined(part: str) -> None:
    assert "__noinline__" not in text_of(short, part)
    assert text_of(lengthy, part).count("__noinline__") == 1
    # A near form is a second one.
    assert text_of(long_and_far, part).count("__noinline__") == (1 if part == "apply" else 2)


def test_what_is_long() -> None:
    """By the instructions of the arithmetic that runs: a result of 16 bits has shorter functions."""
    mish = traced(lambda acc: torch.nn.functional.mish(acc))
    assert cost.is_long(mish.program, mish.kinds, "apply")
    assert not cost.is_long(mish.program, mish.kinds, "apply_bfloat16")
