"""Every tile with an epilogue that reads operands of every kind, however they lie in memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs
from tests.support import plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]


class Kernel(NamedTuple):
    """A tile, and what it computes with."""

    dtype: torch.dtype
    arithmetic: str  # a name of `dry_runs.ARITHMETICS`
    family: str
    tile: int
    tolerance: float


def kernels(
    dtype: torch.dtype, arithmetic: str, family: str, tolerance: float, tiles_of: str = ""
) -> list[Kernel]:
    """A kernel for each tile that is built."""
    count = plans.tile_count(family, tiles_of or arithmetic)
    return [Kernel(dtype, arithmetic, family, tile, tolerance) for tile in range(count)]


KERNELS = [
    *kernels(torch.float16, "ieee", plans.TMA, 1e-2, "16_bits"),
    *kernels(torch.bfloat16, "ieee", plans.TMA, 1e-2, "16_bits"),
    *kernels(torch.float16, "ieee", plans.MMA, 1e-2, "16_bits"),
    *kernels(torch.bfloat16, "ieee", plans.MMA, 1e-2, "16_bits"),
    *kernels(torch.float32, "tf32", plans.TMA, 1e-2),
    *kernels(torch.float32, "tf32", plans.MMA, 1e-2),
    *kernels(torch.float32, "split", plans.FP16X3, 1e-4),
    *kernels(torch.float32, "scaled", plans.FP16X3, 1e-2),
] or [Kernel(torch.bfloat16, "ieee", plans.TMA, 0, 1e-2)]
GAPS = [0, 8, 2, 3]
"""Behind a matrix's rows: none, and such that TMA, loads of pairs or only single loads may bring it."""


@epigemm.epilogue
def every_kind(
    acc: Tensor, bias: PerColumn, factor: PerColumn, row: PerRow, other: Matrix, more: Matrix
) -> Tensor:
    return (acc + bias) * row + factor * other + more


@epigemm.epilogue
def matrix_alone(acc: Tensor, other: Matrix) -> Tensor:
    return acc + other


def with_gap(m: int, n: int, gap: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, n + gap, device="cuda", dtype=dtype)[:, :n]


@epigemm.epilogue
def all_vectors(
    acc: Tensor,
    bias: PerColumn,
    factor: PerColumn,
    shift: PerColumn,
    slope: PerColumn,
    row: PerRow,
    more_of_row: PerRow,
    other: Matrix,
) -> Tensor:
    """They take a slot's place."""
    return (acc + bias) * row + factor * other + shift + slope * more_of_row


def run(
    epilogue: epigemm.UserEpilogue, x: Tensor, weight: Tensor, operands: list[Tensor], kernel: Kernel
) -> Tensor:
    out = x.new_full((x.shape[0], weight.shape[0]), float("nan"))
    spec = typed(epilogue.traced, [each.dtype != x.dtype for each in operands])
    call = LinearCall(spec, x, weight, operands, out=out)
    plan = (dry_runs.ARITHMETICS.index(kernel.arithmetic), *plans.numbers(kernel.family, kernel.tile))
    return resolve.linear(call, plan)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: f"{each.dtype}-{each.arithmetic}-{each.tile}")
@pytest.mark.parametrize("gap", GAPS)
def test_every_tile(kernel: Kernel, gap: int) -> None:
    torch.manual_seed(0)
    dtype = kernel.dtype
    for m, n, k in [(1, 8, 8), (300, 264, 72), (130, 392, 200)]:
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        weight = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
        bias, factor = torch.randn(n, device="cuda", dtype=dtype), torch.randn(n, device="cuda")
        row, other = torch.randn(m, 1, device="cuda", dtype=dtype), with_gap(m, n, gap, dtype)
        more = with_gap(m, n, gap, torch.float32)
        sums = x.double() @ weight.double().t()
        expected = (sums + bias.double()) * row.double() + factor.double() * other.double()

        def check(actual: Tensor, expected: Tensor) -> None:
            tolerance = kernel.tolerance
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=2 * tolerance)

        check(run(every_kind, x, weight, [bias, factor, row, other, more], kernel), expected + more.double())
        check(run(matrix_alone, x, weight, [other], kernel), sums + other.double())
        shift, slope = torch.randn(n, device="cuda", dtype=dtype), torch.randn(n, device="cuda", dtype=dtype)
        operands = [bias, factor, shift, slope, row, row.flip(0).contiguous(), other]
        check(
            run(all_vectors, x, weight, operands, kernel),
            expected + shift.double() + slope.double() * operands[5].double(),
        )
