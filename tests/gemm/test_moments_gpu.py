"""Statistics beside products on a GPU: every large tile by force, and kernels that another one follows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import products
from epigemm import Matrix, PerColumn
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs
from tests.support import plans
from tests.support.cases import poisoned
from tests.support.moments import assert_close, poison_free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)
TILES = range(plans.tile_count(plans.TMA, "16_bits")) or [0]
TF32_TILES = range(plans.tile_count(plans.TMA, "tf32")) or [0]
SHAPES = [
    # M, N, K: one row, ragged blocks and tiles, one stage of K and less, and more tiles than multiprocessors
    (1, 8, 64),
    (63, 200, 64),
    (65, 264, 136),
    (129, 8, 8),
    (1000, 200, 72),
    (3333, 1032, 264),
    (2048, 4096, 512),
]


@epigemm.epilogue
def biased_residual(acc: Tensor, bias: PerColumn, residual: Matrix) -> Tensor:
    """acc + bias + residual."""
    return acc + bias + residual


def run(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    plan: list[int],
    *,
    arithmetic: str = "ieee",
    bias: float = 0.0,
    has_residual: bool = False,
    gap: int = 0,
) -> Tensor:
    """The result, after its statistics were held against it, twice, and against the result without statistics."""
    m, n, k = sizes
    x, weight = (torch.randn(size, device=DEVICE).to(dtype) for size in ((m, k), (n, k)))
    vector: Tensor | None = (torch.randn(n, device=DEVICE) + bias).to(dtype)
    name, operands = "bias", list[Tensor]()
    if has_residual:
        assert vector is not None
        name = typed(biased_residual.traced, (False, False)).name
        operands, vector = [vector, torch.randn(m, n, device=DEVICE).to(dtype)], None

    def launch(columns: Tensor | None) -> Tensor:
        out = poisoned((m, n + gap), dtype, DEVICE)[:, :n]
        poison_free_memory(DEVICE, 1 + (m * n >> 18))
        return products.forced_into(
            out,
            name,
            x,
            weight,
            arithmetic,
            bias=vector,
            operands=operands,
            plan=plan,
            moments=columns,
        )

    found = []
    for _ in range(2):
        columns = torch.full((2, n), float("nan"), device=DEVICE)
        out = launch(columns)
        assert_close(out, *columns)
        found.append((out, columns))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "two runs"
    assert torch.equal(found[0][0], launch(None))
    return found[0][0]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile(tile: int, dtype: torch.dtype) -> None:
    for sizes in SHAPES:
        for raster, swizzle in ((0, 8), (1, 1)):
            run(sizes, dtype, plans.numbers(plans.TMA, tile, raster, swizzle))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_a_mean_of_10000(tile: int, dtype: torch.dtype) -> None:
    run((1000, 264, 64), dtype, plans.numbers(plans.TMA, tile), bias=1e4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_a_matrix_in_the_place_of_the_results(tile: int, dtype: torch.dtype) -> None:
    """TMA writes the next pass's part of it where the helper has read."""
    for sizes in SHAPES[1:]:
        run(sizes, dtype, plans.numbers(plans.TMA, tile), has_residual=True)


@pytest.mark.parametrize("tile", TILES)
def test_rows_with_gaps(tile: int) -> None:
    run((333, 200, 128), torch.bfloat16, plans.numbers(plans.TMA, tile), gap=24)


@pytest.mark.parametrize("tile", TF32_TILES)
def test_every_tile_in_tf32(tile: int) -> None:
    for sizes in SHAPES:
        run(sizes, torch.float32, plans.numbers(plans.TMA, tile), arithmetic="tf32")
    run((1000, 264, 64), torch.float32, plans.numbers(plans.TMA, tile), arithmetic="tf32", bias=1e4)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_other_kernels(sizes: tuple[int, int, int]) -> None:
    for dtype in HALVES:
        run(sizes, dtype, plans.numbers(plans.SWAP_AB))
        run(sizes, dtype, list(dry_runs.FALLBACK[1:]))
    run(sizes, torch.float32, list(dry_runs.FALLBACK[1:]), bias=1e4)
    run(sizes, torch.float32, plans.numbers(plans.FP16X3), arithmetic="split", bias=1e4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_infinities_and_nans(tile: int, dtype: torch.dtype) -> None:
    """A mean is infinite where the sum is, NaN of infinities of both signs; the variance is NaN, as PyTorch's."""
    m, n, k = 333, 264, 8
    inf = float("inf")
    x, weight = (torch.zeros(size, device=DEVICE, dtype=dtype) for size in ((m, k), (n, k)))
    name = typed(biased_residual.traced, (False, False)).name
    residual = torch.randn(m, n, device=DEVICE).to(dtype)
    for row, column, number in (
        *((0, 5, inf), (63, 6, inf), (64, 64, -inf), (332, 100, -inf), (10, 263, inf), (11, 0, -inf)),
        *((20, 30, inf), (21, 30, -inf), (22, 40, inf), (22, 41, -inf), (30, 50, float("nan"))),
        *((128, 128, inf), (128, 192, inf), (200, 200, -inf), (300, 200, -inf)),
    ):
        residual[row, column] = number
    mean, variance = columns = torch.full((2, n), 7.0, device=DEVICE)
    out = products.forced_into(
        torch.empty(m, n, device=DEVICE, dtype=dtype),
        name,
        x,
        weight,
        "ieee",
        operands=[torch.zeros(n, device=DEVICE, dtype=dtype), residual],
        plan=plans.numbers(plans.TMA, tile),
        moments=columns,
    )
    assert torch.equal(out.nan_to_num(7.0), residual.nan_to_num(7.0))
    want = out.double().mean(0)
    special = ~want.isfinite()
    assert torch.equal(mean[special].double().nan_to_num(7.0), want[special].nan_to_num(7.0))
    assert torch.equal(variance.isnan(), special) and bool(special.any())
    assert_close(out[:, ~special], mean[~special], variance[~special])


def test_on_copies() -> None:
    """Rows of N = 203 numbers, which TMA cannot store, are copied from padded ones: what is behind them counts not."""
    for tile in TILES:
        for sizes in ((1000, 203, 131), (129, 257, 64), (65, 1, 64), (300, 65, 72)):
            run(sizes, torch.bfloat16, plans.numbers(plans.TMA, tile))


@pytest.mark.parametrize("tile", TILES)
def test_again_and_again(tile: int) -> None:
    """The same bits at each of many launches in a row, whatever other kernels left behind."""
    for _ in range(5):
        run((2049, 1544, 1000), torch.bfloat16, plans.numbers(plans.TMA, tile))
