"""A linear layer's result with the moments of its columns."""

from __future__ import annotations

import pytest
import torch

from epigemm.arguments.calls import FIND
from epigemm.calls import moments

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_scale", [False, True])
def test_the_result_and_its_moments(dtype: torch.dtype, has_scale: bool, device: torch.device) -> None:
    x, weight = torch.randn(70, 32, device=device).to(dtype), torch.randn(24, 32, device=device).to(dtype)
    bias, scale = (torch.randn(24, device=device).to(dtype) for _ in range(2))
    given = (bias, scale if has_scale else None)
    z, mean, var = moments.linear_folded_with_moments(x, weight, given, None, False, FIND)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = expected * scale.double() if has_scale else expected
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-4)
    torch.testing.assert_close(z.double(), expected, rtol=tolerance, atol=tolerance)
    assert mean.dtype is var.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    variance, average = torch.var_mean(z.double(), 0, correction=0)
    torch.testing.assert_close(mean.double(), average, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(var.double(), variance, rtol=1e-5, atol=1e-5)
