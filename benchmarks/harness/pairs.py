"""A gated pair of products against float64: the bound of `accuracy` for each product, and both through the formula.

With a = activation(z1) and the bounds d1 and d2 on the products' errors, the result a z2 is off by at most
``|activation(z1 +- d1) - a| (|z2| + d2) + |a| d2``, the larger one of the two ends, with an eighth for curvature. The
second product is always rounded to the output's dtype: it is a matrix between two kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import Case, Data, Shape
from benchmarks.cases.glu import ACTIVATIONS
from benchmarks.harness.accuracy import SMALLEST_STEP, UNIT_ROUNDOFF, Reference
from benchmarks.harness.records import Accuracy

_U = 2.0**-24


class PairReference:
    """The float64 result of a case whose one weight has the rows of both products."""

    def __init__(self, case: Case, data: Data, seed: int) -> None:
        m, n, k = case.shape.m, case.shape.n // 2, case.shape.k
        assert data.weight is not None
        half = replace(case, shape=Shape(m, n, k))
        self._case, self._shape = case, (m, n)
        self._products = [
            Reference(half, Data(data.x, weight, data.parameters), seed) for weight in data.weight.chunk(2)
        ]

    def compare(self, out: Tensor, intermediate_roundings: int) -> Accuracy:
        """Hold one result against the reference, as `Reference.compare`."""
        dtype = self._case.setting.dtype
        if tuple(out.shape) != self._shape or out.dtype != dtype:
            return Accuracy.wrong(f"result is {tuple(out.shape)} {out.dtype}, expected {self._shape}")
        u_out, activate = UNIT_ROUNDOFF[dtype], ACTIVATIONS[self._case.problem.epilogue]
        bad, worst, square_error, square = 0, 0.0, 0.0, 0.0
        for first, second in zip(*(each.products for each in self._products), strict=True):
            z1, z2 = first.acc, second.acc
            d1 = first.delta + (4 * _U + intermediate_roundings * u_out) * z1.abs()
            d2 = second.delta + (4 * _U + max(intermediate_roundings, 1) * u_out) * z2.abs()
            a = activate(z1)
            moved = torch.maximum((activate(z1 - d1) - a).abs(), (activate(z1 + d1) - a).abs()) * 1.125
            # Terms of the size of z1 cancel within GELU.
            own = 16 * _U * (a.abs() + z1.abs())
            expected = a * z2
            spread = (moved + own) * (z2.abs() + d2) + a.abs() * d2
            spread += (16 * _U + intermediate_roundings * u_out) * expected.abs()
            bound = spread * (1 + u_out) + u_out * expected.abs() + SMALLEST_STEP[dtype]
            error = (out[:, first.columns].double() - expected).abs()
            ratio = (error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
            bad += int((ratio > 1.0).sum())
            worst = max(worst, float(ratio.max()))
            square_error += float(error.square().sum())
            square += float(expected.square().sum())
        relative = math.sqrt(square_error / square) if square > 0 else math.nan
        return Accuracy(bad == 0, bad, worst, relative, self._products[0].checked_columns)
