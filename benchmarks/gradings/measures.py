"""Errors of an fp32 product against float64.

With eps = 2^-24 and, entry by entry, |A||B| = ``|x| @ |weight|.T``, the *ratio* of an entry is ``|error| / (eps
|A||B|)``: what any correctly summed product has a bound for, whatever the scales of rows and whatever cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gradings.bounds import EPS


@dataclass(frozen=True)
class Exact:
    """What float64 says of ``x @ weight.T``."""

    product: Tensor
    magnitude: Tensor  # |A||B|
    blas_scale: Tensor  # sqrt(K + 2) ||A||_F ||B||_F

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Exact:
        """The reference of fp32 operands [M, K] and [N, K], computed where they are."""
        a, b = x.double(), weight.double()
        product = a @ b.t()
        norms = torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b) * math.sqrt(x.shape[1] + 2)
        return cls(product, a.abs_() @ b.abs_().t(), norms)


@dataclass(frozen=True)
class Errors:
    """One result.

    Attributes:
        max_ratio: the largest |error| / (eps |A||B|); infinity where an exact zero is not zero.
        rms_ratio: the root of the mean of its square.
        relative: ||error||_F / ||A B||_F.
        blas: BLAS++'s measure ||error||_F / (sqrt(K + 2) ||A||_F ||B||_F), in units of eps: below 1 passes.
        not_finite: entries that are NaN or infinite although the operands are finite and nothing overflows.
    """

    max_ratio: float
    rms_ratio: float
    relative: float
    blas: float
    not_finite: int


def ratios(result: Tensor, exact: Exact) -> Tensor:
    """|error| / (eps |A||B|), entry by entry; 0/0 is 0."""
    error = (result.double() - exact.product).abs_()
    ratio = error / (EPS * exact.magnitude)
    return torch.where(error == 0, 0.0, ratio).nan_to_num_(nan=math.inf, posinf=math.inf)


def errors(result: Tensor, exact: Exact) -> Errors:
    """All measures of one result, by one transfer from the device."""
    ratio = ratios(result, exact)
    norm = torch.linalg.matrix_norm(result.double() - exact.product)
    values = (
        ratio.max(),
        ratio.square().mean().sqrt(),
        norm / torch.linalg.matrix_norm(exact.product),
        norm / (EPS * exact.blas_scale),
    )
    not_finite = (~result.isfinite()).sum().double()
    largest, rms, relative, blas, count = torch.stack([*values, not_finite]).tolist()
    return Errors(largest, rms, relative, blas, int(count))


def worst(found: list[Errors]) -> Errors:
    """Over several seeds: the largest maximum, the mean square of the rms, the largest of the rest."""
    return Errors(
        max(e.max_ratio for e in found),
        math.sqrt(sum(e.rms_ratio**2 for e in found) / len(found)),
        max(e.relative for e in found),
        max(e.blas for e in found),
        sum(e.not_finite for e in found),
    )
