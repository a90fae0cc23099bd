"""Under autocast, of functions with several results, layers one after the other, and on a GPU.

Of each row of the table: tests/ops/test_autocast.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import epigemm
from tests.support.formulas import formula

N, K = 6, 8


cast = epigemm.epilogue(formula("acc, residual: Matrix -> (acc + residual).to(torch.bfloat16)"))


def test_what_a_function_casts_to_has_the_products_type() -> None:
    x, weight, residual = torch.randn(3, K), torch.randn(N, K), torch.randn(3, N)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast(x, weight, residual).dtype is torch.bfloat16


def test_a_residual_stream_stays_in_fp32() -> None:
    """A stream of 16 bits would lose 8 bits at each block."""
    torch.manual_seed(0)
    layers = [epigemm.nn.LinearResidual(32, 32) for _ in range(24)]
    stream = theirs = torch.randn(4, 32) * 8
    exact = stream.double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for each in layers:
            each.weight *= 0.05
            stream, theirs = each(stream, stream), F.linear(theirs, each.weight, each.bias) + theirs
            with torch.autocast("cpu", enabled=False):
                bias = None if each.bias is None else each.bias.double()
                exact = F.linear(exact, each.weight.double(), bias) + exact
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (stream, theirs)]
    assert errors[0] <= 1.1 * errors[1] < 2e-3
