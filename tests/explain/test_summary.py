"""`explain` of functions with several results: which result each launch is. What it says is held by `tests/net`."""

from __future__ import annotations

import torch

import epigemm
from tests.net.explanations import several
from tests.support.results import gelu_and_product, statistics
from tests.support.stage import Stage


def test_on_a_gpu_the_product_is_one_kernel(stage: Stage) -> None:
    """A pretended one, whose kernels are in Python; and the kernel that multiplies is tuned."""
    x, weight, bias, other = (
        torch.ones(size).bfloat16() for size in ((256, 256), (64, 256), (64,), (256, 64))
    )
    found = epigemm.explain(gelu_and_product, x, weight, bias)
    assert "gelu_and_product_and_stored" in found.kernels[0] and found.kernels[0].endswith(": r0, r1")
    assert not any("gelu_and_product_result0" in kernel for kernel in found.kernels)
    got = gelu_and_product(x, weight, bias)
    assert got[0].shape == (256, 64)
    tuned = epigemm.tune(several, x, weight, bias, other)
    assert {entry.epilogue for entry in tuned.entries} == {"bias"}
    tuned = epigemm.tune(statistics, x, weight, bias, bias)
    assert all(entry.epilogue.startswith("statistics_shared") for entry in tuned.entries) and tuned.entries
