"""Calls that no kernel takes and PyTorch's operators compute, against float64."""

from __future__ import annotations

import pytest
import torch

from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.calls import by_reference
from epigemm.epilogues.library import SCALE_BATCH_NORM
from epigemm.epilogues.registry import fold_batch_norm_reference

x, weight, bias = torch.randn(3, 5, 16), torch.randn(8, 16), torch.randn(8)
product = x.double() @ weight.double().t()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_folds_bias_is_added_before_the_product_is_rounded(dtype: torch.dtype) -> None:
    """A bias that cancels the product leaves what the two differ by, not what 16 bits lose."""
    rows, columns = torch.ones(4, 16, dtype=dtype), torch.full((8, 16), 16.0, dtype=dtype)
    cancels, scale = torch.full((8,), -256.0, dtype=dtype), torch.rand(8) + 0.5
    rows[:, 0] = 1.0625
    fold = checks.fold_batch_norm(rows, (cancels, scale, None, None, None, None), 0.0, 8)
    found = by_reference.of_call(LinearCall(SCALE_BATCH_NORM, rows, columns, fold=fold))
    torch.testing.assert_close(found, scale.to(dtype).expand(4, 8) * 1.0)


def test_a_fold_is_that_of_the_reference() -> None:
    vectors = tuple(torch.rand(8) + 0.5 for _ in range(6))
    fold = checks.fold_batch_norm(x, vectors, 1e-5, 8)
    multiplier, offset = fold_batch_norm_reference(x, vectors, 1e-5).unbind(0)
    found = by_reference.of_call(LinearCall(SCALE_BATCH_NORM, x, weight, fold=fold))
    torch.testing.assert_close(found, (product * multiplier + offset).float(), rtol=1e-5, atol=1e-5)
