"""Column statistics of stored matrices on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.calls.moments import column_moments
from tests.support.cases import poisoned
from tests.support.moments import assert_close, poison_free_memory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [
    (1, 1), (1, 7), (2, 256), (63, 129), (64, 256), (65, 257), (1000, 1), (127, 31), (5000, 33), (4097, 1032),
    (1 << 17, 8), (300, 8192), (16384, 512),
]  # fmt: skip
LAYOUTS = {"contiguous": (0, 0), "aligned gaps": (16, 0), "odd gaps": (3, 0), "odd address": (16, 1)}

types = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(z: Tensor) -> None:
    """Twice, with the same bits."""
    found = []
    for _ in range(2):
        poison_free_memory(DEVICE)
        found.append(column_moments(z)[:2])
    assert_close(z, *found[0])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second) and first.is_contiguous()


@types
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_layouts(layout: str, dtype: torch.dtype) -> None:
    """What lies beside the matrix is NaN."""
    gap, begin = LAYOUTS[layout]
    for m, n in SHAPES:
        z = poisoned((m, n + gap), dtype, DEVICE)[:, begin : n + begin]
        z.copy_(torch.randn(m, n, device=DEVICE, dtype=torch.float64))
        check(z)


@types
def test_a_mean_of_10000(dtype: torch.dtype) -> None:
    for m, n in SHAPES:
        check((torch.randn(m, n, device=DEVICE, dtype=torch.float64) + 1e4).to(dtype))


def test_as_accurate_as_torch() -> None:
    """In fp32, with a mean of 10,000 and a deviation of 1: at most twice its error, or a twentieth of a rounding's."""
    z = torch.randn(16384, 512, device=DEVICE) + 1e4
    expected, _ = torch.var_mean(z.double(), 0, correction=0)
    ours, theirs = column_moments(z)[1], torch.var_mean(z, 0, correction=0)[0]
    error, of_torch = ((each.double() - expected).abs().max().item() for each in (ours, theirs))
    assert error <= max(2 * of_torch, 0.05 * 1e4 * torch.finfo(z.dtype).eps), (error, of_torch)


@types
def test_special_columns(dtype: torch.dtype) -> None:
    z = torch.randn(200, 4, device=DEVICE).to(dtype)
    z[:, 0] = 3.140625
    z[150, 1] = float("nan")
    z[150, 2] = float("inf")
    mean, variance, *_ = column_moments(z)
    assert mean[0] == 3.140625 and variance[0] == 0
    assert mean[1].isnan() and variance[1].isnan() and variance[2].isnan()
    assert_close(z[:, 3:], mean[3:], variance[3:])


@types
@pytest.mark.parametrize("rows", [1, 63, 200, 5000])
def test_a_mean_is_infinite_where_the_sum_is(rows: int, dtype: torch.dtype) -> None:
    """Of infinities of one sign, in any row; NaN of both and of NaN itself. The variance is NaN, as PyTorch's."""
    inf, nan = float("inf"), float("nan")
    z = torch.randn(rows, 40, device=DEVICE).to(dtype)
    last = rows - 1
    ends = [{0: inf}, {0: -inf}, {last: inf}, {last: -inf}, {0: nan}, {last: nan}, {last // 2: inf}]
    for column, placed in enumerate((*ends, {0: inf, last: inf})):
        for row, number in placed.items():
            z[row, column] = number
    if rows > 1:
        z[0, 8], z[last, 8] = inf, -inf
        z[0, 9], z[last, 9] = -inf, inf
    mean, variance, *_ = column_moments(z)
    of_variance, of_mean = z.double().var(0, correction=0), z.double().mean(0)  # var_mean's mean is NaN
    special = ~of_mean.isfinite()
    assert torch.equal(mean[special].double().nan_to_num(7.0), of_mean[special].nan_to_num(7.0))
    assert torch.equal(variance.isnan(), of_variance.isnan())
    assert_close(z[:, ~special], mean[~special], variance[~special])


def test_columns_that_are_not_neighbours() -> None:
    z = torch.randn(130, 66, device=DEVICE)
    assert_close(z[:, ::2], *column_moments(z[:, ::2])[:2])
    assert_close(z.t(), *column_moments(z.t())[:2])


def test_no_rows_as_torch() -> None:
    mean, variance, *_ = column_moments(torch.empty(0, 8, device=DEVICE))
    assert bool(mean.isnan().all()) and bool(variance.isnan().all())


def test_what_the_operator_refuses() -> None:
    run = operator("_column_moments_out")
    z, blocks, out = (torch.empty(size, device=DEVICE) for size in ((65, 8), (2, 8, 2), (2, 8)))
    run(z, blocks, out)
    for wrong, words in (
        ((z.t(), blocks, out), "matrix has shape"),
        ((z[0], blocks, out), "matrix has shape"),
        ((z, blocks[1:], out), "blocks has 16 numbers; accepted are at least 32"),
        ((z, blocks.double(), out), "blocks has"),
        ((z, blocks, out[:, 1:]), "out has shape"),
        ((z, blocks, out.double()), "out has shape"),
        ((z.double(), blocks, out.double()), "blocks has"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(*wrong)
