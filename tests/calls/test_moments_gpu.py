"""Products with column statistics on a GPU, as BatchNorm calls them."""

from __future__ import annotations

import pytest
import torch

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import moments
from epigemm.epilogues.library import BIAS
from tests.support.moments import assert_close, poison_free_memory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", [None, "highest", "high"])
def test_linear(dtype: torch.dtype, precision: str | None) -> None:
    """Within a few roundings of the plain call's result, and the statistics are those of the result itself."""
    for m, n, k in ((1, 16, 32), (1000, 200, 64), (4096, 1024, 512), (1024, 2048, 2048), (130, 65, 33)):
        x, weight, bias = (torch.randn(size, device=DEVICE).to(dtype) for size in ((m, k), (n, k), (n,)))
        call, found = LinearCall(BIAS, x, weight, (bias,), precision or DEFAULT), []
        for _ in range(2):
            poison_free_memory(DEVICE)
            found.append(moments.with_moments(call))
        z, (mean, variance, *_) = found[0]
        assert_close(z, mean, variance)
        assert torch.equal(z, found[1][0])
        for first, second in zip(found[0][1][:2], found[1][1][:2], strict=True):
            assert torch.equal(first, second)
        expected = x.double() @ weight.double().t() + bias.double()
        narrow = dtype is not torch.float64 and (dtype is not torch.float32 or precision == "high")
        rounding = (2**-7 if dtype is torch.bfloat16 else 2**-9) if narrow else 2**-18
        torch.testing.assert_close(z.double(), expected, rtol=4 * rounding, atol=4 * rounding * k**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_blocks_are_left(dtype: torch.dtype) -> None:
    """Their moments, merged in float64, are those of the result. More blocks are merged; a kernel's may be smaller."""
    for m, n, k in ((2, 16, 32), (1000, 200, 64), (1024, 4096, 512), (700, 65, 33)):
        x, weight = (torch.randn(size, device=DEVICE).to(dtype) for size in ((m, k), (n, k)))
        poison_free_memory(DEVICE)
        z, found = moments.with_moments(LinearCall(BIAS, x, weight, (None,)), leaves_blocks=True)
        if found.blocks is None:
            assert dtype.itemsize == 2 and m >= 700
            assert_close(z, *found[:2])
            continue
        count = -(-m // found.block_rows)
        mean, squares = found.blocks[:count].double().unbind(-1)
        rows = torch.full((count, 1), float(found.block_rows), device=DEVICE, dtype=torch.float64)
        rows[-1] = m - (count - 1) * found.block_rows
        of_columns = (rows * mean).sum(0) / m
        variance = (squares + rows * (mean - of_columns).square()).sum(0) / m
        assert_close(z, of_columns.to(found.mean.dtype), variance.to(found.mean.dtype))
    x, weight = (torch.randn(size, device=DEVICE).to(dtype) for size in ((4096, 64), (128, 64)))
    z, found = moments.with_moments(LinearCall(BIAS, x, weight, (None,)), leaves_blocks=True)
    assert found.blocks is None
    assert_close(z, *found[:2])
