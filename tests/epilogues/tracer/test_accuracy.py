"""Where a 16-bit result may be computed with short functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from tests.support.formulas import formula


def test_whole_numbers_are_not_made_of_short_instructions() -> None:
    """An approximate quotient just below a whole number would be one too small behind `trunc`."""
    share, chosen = "acc / step", "torch.where(acc > 0, acc, torch.exp(acc) * step)"
    for stepped, plain in (
        ("torch.trunc(acc / step)", share),
        ("torch.where(torch.exp(acc) > 0, step, 0.0)", chosen),
        ("torch.div(acc, step, rounding_mode='trunc')", chosen),
    ):
        programs = [trace(formula(f"acc, step: PerColumn -> {value}")) for value in (stepped, plain)]
        for part, number in (("apply_float16", "Rounded"), ("apply_bfloat16", "RoundedToBFloat16")):
            texts = [program.kernel_source((1,), ("operand", part)) for program in programs]
            assert [f"<Functor, epigemm::{number}, " in text for text in texts] == [False, True]


@pytest.mark.parametrize(
    ("function", "may_be"),
    [
        (lambda acc: torch.sigmoid(acc) * acc, True),
        (lambda acc: acc + torch.sigmoid(acc), True),  # off by few units
        (lambda acc: 1 + torch.exp(acc), True),
        (lambda acc: F.gelu(acc) * 3.0, True),
        (lambda acc: acc - torch.tanh(acc), False),  # the terms may cancel
        (lambda acc: 1 - torch.tanh(acc), False),
        (lambda acc: F.softplus(acc) + torch.exp(acc), True),  # of one sign
        (lambda acc: torch.sin(torch.tanh(acc)), False),
        (lambda acc: torch.sin(torch.sigmoid(acc)), True),
        (lambda acc: torch.tanh(acc) ** 2, True),
        (lambda acc: torch.tanh(acc) ** 17.0, False),
        (lambda acc: torch.round(torch.sigmoid(acc)), False),
        (lambda acc: torch.round(acc), True),
        (lambda acc: acc + torch.asinh(acc), True),
        (lambda acc: torch.atanh(acc) - torch.acosh(acc), True),
        (lambda acc: torch.round(torch.asinh(acc)), False),
        (lambda acc: torch.round(torch.digamma(acc)), True),  # no shorter one
        (lambda acc: acc // 0.3, True),  # exact
        (lambda acc: torch.sigmoid(acc) // 0.3, False),
        (lambda acc: torch.logaddexp(acc, 0.5 * acc), True),
        (lambda acc: 1.0 - torch.logaddexp(acc, 0.5 * acc), False),
        (lambda acc: torch.logaddexp(torch.tanh(acc), acc), False),
    ],
)
def test_errors_that_grow(function: Callable[..., Tensor], may_be: bool) -> None:
    program = trace(function).program
    assert (short_number(program, ROUNDED_TO["float16"]) is not None) is may_be


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda acc: torch.tanh(acc) * acc, "RoundedToBFloat16"),
        (lambda acc: F.gelu(acc) * torch.tanh(acc), "RoundedToBFloat16"),
        (lambda acc: torch.tanh(acc) * torch.tanh(0.5 * acc), "Rounded"),  # together more than a quarter
        (lambda acc: torch.sigmoid(acc) + acc, "RoundedToBFloat16"),
        (lambda acc: torch.tanh(acc) + acc, None),
    ],
)
def test_bfloat16_takes_shorter_ones(function: Callable[..., Tensor], number: str | None) -> None:
    program = trace(function).program
    assert short_number(program, ROUNDED_TO["bfloat16"]) == number
    assert short_number(program, ROUNDED_TO["float16"]) in ("Rounded", None)
