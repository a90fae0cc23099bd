"""A linear layer's result together with the mean and the variance of each of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import FIND, FoldCall, LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import deeds
from epigemm.epilogues.registry import BIAS, SCALE_BATCH_NORM, compute_dtype


def linear_folded_with_moments(
    x: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    precision: str | None,
    strict: bool,
    use: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """z = (x @ weight.T + bias) * scale, and the mean and biased variance of z's columns, below autograd.

    `x`: `[M, K]`. `vectors`: bias and scale, `[N]` or None. `precision`, `strict`: as of the public functions. `use`:
    what the call may do with the weight's pack.
    """
    bias, scale = vectors
    asked = DEFAULT if precision is None else checks.precision(precision)
    options = (asked, FIND if use is None else use, strict)
    if scale is None:
        z = deeds.run_linear(LinearCall(BIAS, x, weight, bias, (), (), *options))
    else:
        fold = FoldCall(x, weight.shape[0], (bias, scale, None, None, None, None), 0.0)
        z = deeds.linear(LinearCall(SCALE_BATCH_NORM, x, weight, None, (), (), *options), fold=fold)
    return z, *column_moments(z)


def column_moments(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a matrix's columns, `[N]` each, in fp32 (fp64 of fp64)."""
    variance, mean = torch.var_mean(z.to(compute_dtype(z.dtype)), 0, correction=0)
    return mean, variance
