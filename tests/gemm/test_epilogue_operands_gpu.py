"""Every tile with an epilogue that reads operands of every kind, however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow
from epigemm.arguments.calls import LinearCall
from epigemm.calls import deeds
from epigemm.planning import dry_runs
from tests.support import plans
from tests.support.cases import fused_unavailable

pytestmark = pytest.mark.gpu

DTYPES = {torch.float16: "16_bits", torch.bfloat16: "16_bits", torch.float32: "tf32"}
KERNELS = [
    (dtype, tile) for dtype, kind in DTYPES.items() for tile in range(plans.tile_count(plans.TMA, kind))
] or [(torch.bfloat16, 0)]
GAPS = [0, 8, 2, 3]
"""Behind a matrix's rows: none, and such that TMA, loads of pairs or only single loads may bring it."""


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")


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


def run(
    epilogue: epigemm.UserEpilogue, x: Tensor, weight: Tensor, operands: list[Tensor], tile: int
) -> Tensor:
    arithmetic = "tf32" if x.dtype == torch.float32 else "ieee"
    out = x.new_full((x.shape[0], weight.shape[0]), float("nan"))
    spec = epilogue.linked([each.dtype != x.dtype for each in operands])
    call = LinearCall(spec, x, weight, None, operands, (), out=out)
    plan = (dry_runs.ARITHMETICS.index(arithmetic), *plans.numbers(plans.TMA, tile))
    return deeds.linear(call, plan)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize("gap", GAPS)
def test_every_tile(dtype: torch.dtype, tile: int, gap: int) -> None:
    torch.manual_seed(0)
    for m, n, k in [(1, 8, 8), (300, 264, 72), (130, 392, 200)]:
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        weight = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
        bias, factor = torch.randn(n, device="cuda", dtype=dtype), torch.randn(n, device="cuda")
        row, other = torch.randn(m, 1, device="cuda", dtype=dtype), with_gap(m, n, gap, dtype)
        more = with_gap(m, n, gap, torch.float32)
        sums = x.double() @ weight.double().t()
        expected = (sums + bias.double()) * row.double() + factor.double() * other.double() + more.double()
        actual = run(every_kind, x, weight, [bias, factor, row, other, more], tile)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=2e-2)
        alone = run(matrix_alone, x, weight, [other], tile)
        torch.testing.assert_close(alone.double(), sums + other.double(), rtol=1e-2, atol=2e-2)
