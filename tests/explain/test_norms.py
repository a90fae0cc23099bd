"""A BatchNorm by the batch's own statistics: whose runs is whose `explain` says. Its words are held by `tests/net`."""

from __future__ import annotations

import pytest
import torch

import epigemm
from tests.support import norm_calls


@pytest.mark.parametrize("is_ours", [True, False])
def test_it_says_whose_runs(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the running statistics stay."""
    calls = norm_calls.counted(monkeypatch) if is_ours else []
    layer, x = epigemm.nn.LinearBatchNormReLU(16, 8), torch.randn(4, 16)
    mean = layer.bn.running_mean
    assert mean is not None
    before = mean.clone()
    (product,) = epigemm.explain(layer, x)
    assert product.explanation is not None
    assert ("normalisation and ReLU" in product.explanation.kernels[-1]) is is_ours
    assert layer.bn.running_mean is mean and torch.equal(before, mean)
    layer(x)
    assert len(calls) == (2 if is_ours else 0)
