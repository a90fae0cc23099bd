"""`epigemm.epilogue`: what it makes of a function, by what that returns."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn, Scalar


def matrix_in_fp32(acc: Tensor) -> Any:
    return torch.tanh(acc).float()


def test_one_matrix_has_the_dtype_of_x() -> None:
    """As always; `return (y.float(),)` is what asks for fp32."""
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert epigemm.epilogue(matrix_in_fp32)(x, x).dtype == torch.bfloat16


@epigemm.epilogue
def normalised(
    acc: Tensor, bias: PerColumn, scale: Scalar = 1.0
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    z = (acc + bias) * scale
    return z, torch.var_mean(z, 0, correction=0), z.amax(1)


def test_help_says_what_it_returns() -> None:
    assert (
        str(inspect.signature(normalised))
        == "(x, weight, /, bias, *, scale=1.0, precision=None, strict=False)"
    )
    text = pydoc.plain(pydoc.render_doc(normalised))
    for words in (
        "The results of normalised(x @ weight.T, ...)",
        "precision, strict: as of",
        "(r0, (r1, r2), r3)",
        "r0: a matrix, [..., N], x's dtype.",
        "r1: var of each column, [N], fp32 (fp64 beside fp64).",
        "r2: mean of each column",
        "r3: amax of each row, [...], fp32",
    ):
        assert words in text, words
