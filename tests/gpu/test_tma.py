"""The large tiles of Hopper, whose operands TMA loads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epigemm._native import build_info
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, RAGGED, Kernel, Sizes, cuda, every_tile, launch
from tests.gpu.properties import (
    Family,
    RowsAlone,
    SecondValues,
    SharedRows,
    Statistics,
    check_statistics,
    of_text,
    offset,
    with_statistics,
)
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, FP32, FUSED_ARITHMETICS, SPLIT
from tests.support.cases import draw_operands, poisoned, signed
from tests.support.moments import assert_close
from tests.support.problems import Problem, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

HALVES = (FP16, BF16)


class TestTma(Family, SharedRows, SecondValues, Statistics):
    kernels = every_tile(plans.TMA, FUSED_ARITHMETICS)
    sizes = ((384, 512, 256), (129, 264, 136), (1, 8, 8), (200, 1032, 64))
    in_order = ((1100, 1304, 96), (3000, 136, 64), (72, 4104, 64))
    depths = (8, 16, 24, 40, 56, 64, 72, 128, 1000, 8192)


class TestOneTile(RowsAlone):
    kernels = every_tile(plans.TMA, [BF16])[:1]


def test_every_tile_is_built() -> None:
    """For every element type that calls may choose it for."""
    kinds = {"16_bits": 2, "tf32": 1, "split": 1, "scaled": 1}  # and the element types of each
    kinds |= {"split_as_it_lies": 2, "scaled_as_it_lies": 2}  # and the orders of the weight
    assert build_info()["gemm_kernels"] == sum(
        count * tiles.get(kind, 0)
        for family, tiles in plans.FAMILIES.items()
        for kind, count in kinds.items()
        if family != plans.MMA
    )


biased_residual = of_text("acc, bias: PerColumn, residual: Matrix -> acc + bias + residual")


class TestStatisticsIn16Bits:
    kernels = every_tile(plans.TMA, HALVES)

    def test_a_matrix_in_the_place_of_the_results(self, kernel: Kernel, rng: torch.Generator) -> None:
        """TMA writes the next pass's part of it where the helper has read."""
        for sizes in RAGGED[1:]:
            check_statistics(make(biased_residual, kernel.arithmetic, sizes, rng), kernel)

    def test_on_copies(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Rows of N = 203 numbers, which TMA cannot store, are copied from padded ones, whose ends do not count."""
        for sizes in ((1000, 203, 131), (129, 257, 64), (65, 1, 64), (300, 65, 72)):
            check_statistics(make("bias", kernel.arithmetic, sizes, rng), kernel)

    def test_infinities_and_nans(self, kernel: Kernel, rng: torch.Generator) -> None:
        """A mean is infinite where the sum is, NaN of infinities of both signs; the variance is NaN, as PyTorch's."""
        problem = make(biased_residual, kernel.arithmetic, (333, 264, 8), rng)
        problem.x.zero_()
        residual, inf = problem.operands.tensors[1], math.inf
        problem.operands.tensors[0].zero_()
        for row, column, number in (
            *((0, 5, inf), (63, 6, inf), (64, 64, -inf), (332, 100, -inf), (10, 263, inf), (11, 0, -inf)),
            *((20, 30, inf), (21, 30, -inf), (22, 40, inf), (22, 41, -inf), (30, 50, math.nan)),
            *((128, 128, inf), (128, 192, inf), (200, 200, -inf), (300, 200, -inf)),
        ):
            residual[row, column] = number
        out, columns = with_statistics(problem, kernel)
        assert torch.equal(out.nan_to_num(7.0), residual.nan_to_num(7.0))
        assert_special_statistics(out, columns)


def assert_special_statistics(out: Tensor, columns: Tensor) -> None:
    """Of columns with numbers that are not finite, and of the others."""
    mean, variance = columns
    want = out.double().mean(0)
    special = ~want.isfinite()
    assert torch.equal(mean[special].double().nan_to_num(7.0), want[special].nan_to_num(7.0))
    assert torch.equal(variance.isnan(), special) and bool(special.any())
    assert_close(out[:, ~special], mean[~special], variance[~special])


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_statistics_by_a_kernel_that_follows(sizes: Sizes, rng: torch.Generator) -> None:
    """Of results that other kernels, and PyTorch's GEMM, have written."""
    fallback = list(dry_runs.FALLBACK[1:])
    for arithmetic in HALVES:
        problem = make("bias", arithmetic, sizes, rng)
        for plan in (plans.numbers(plans.SWAP_AB), fallback):
            check_statistics(problem, plan)
    # A forced plan of PyTorch's GEMM has no arithmetic on slices.
    problem = make("bias", SPLIT, sizes, rng)
    check_statistics(offset(problem, 1e4), plans.numbers(plans.FP16X3))
    problem.arithmetic = FP32
    check_statistics(problem, fallback)


def test_leading_dimensions_fuse_without_copies(rng: torch.Generator) -> None:
    operands = draw_operands("bias", 256, BF16, DEVICE, rng)
    weight, x = (signed(size, rng).to(DEVICE, torch.bfloat16) for size in ((256, 128), (4, 64, 128)))
    problem = Problem("bias", BF16, x, weight, operands)
    plan = plans.numbers(plans.TMA)
    problem.check(launch(problem, plan))
    cuda.synchronize()
    out = problem.out()
    before = cuda.memory_stats()["allocation.all.allocated"]
    launch(problem, plan, out=out)
    assert cuda.memory_stats()["allocation.all.allocated"] - before <= 1, "at most a workspace"


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(rng: torch.Generator) -> None:
    """Row offsets of x beyond 32 bits."""
    m, n, k = 140_000, 256, 16_384
    x, weight = (torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE) for rows in (m, n))
    problem = Problem("bias_relu", BF16, x, weight, draw_operands("bias_relu", n, BF16, DEVICE, rng))
    out = launch(problem, plans.numbers(plans.TMA, 4, raster=1), out=poisoned((m, n), torch.bfloat16, DEVICE))
    rows = torch.tensor([0, 1, 131_070, 131_071, 131_072, 139_999], device=DEVICE)
    Problem("bias_relu", BF16, x[rows], weight, problem.operands).check(out[rows])
    assert not out.isnan().any()
