"""The kernels that read an fp32 weight as it lies: every tile, and remembered roots, which change no bit."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.arithmetic import SCALED, SPLIT, Arithmetic
from tests.support.problems import Problem, make
from tests.support.split import beyond_slices, check_frame, check_integers, plan, run, run_checked, tile_count

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
TILES = [(SPLIT, tile) for tile in range(5)] + [(SCALED, tile) for tile in range(4)]
tiles = pytest.mark.parametrize(
    ("arithmetic", "tile"), TILES, ids=lambda value: getattr(value, "name", str(value))
)


def lying(arithmetic: Arithmetic, tile: int, raster: int = 0, swizzle: int = 1) -> list[int]:
    """The plan: these tiles come behind those on slices of the weight."""
    return plan(tile_count(arithmetic) + tile, raster, swizzle)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons in which a NaN equals itself."""
    return tensor.view(torch.int32)


def remembered(problem: Problem, root: float) -> torch.Tensor:
    """The same root for each row, as the kernels get and correct it."""
    return torch.full((problem.weight.shape[0],), root, device=DEVICE).view(torch.uint8)


@tiles
def test_every_tile(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Whole tiles and their edges in M, N and K; a single row; more tiles than a GPU computes at once."""
    for shape in [
        (256, 512, 256),
        (129, 264, 136),
        (1, 4, 4),
        (33, 60, 76),
        (257, 132, 1032),
        (640, 4100, 200),
    ]:
        for swizzle in (1, 4):
            problem = make("bias_gelu", arithmetic, shape, DEVICE, rng)
            run_checked(problem, lying(arithmetic, tile, swizzle % 2, swizzle))


@tiles
def test_no_bit_depends_on_what_is_remembered(
    arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    """And what is remembered is right afterwards: the next call changes none of it."""
    problem = make("bias", arithmetic, (300, 520, 328), DEVICE, rng)
    problem.weight[7], problem.weight[100] = 0.0, problem.weight[100] * 2.0**-140
    expected = run(problem, lying(arithmetic, tile))
    for root in (1.0, 2.0**30, 2.0**-30, 0.0, math.nan, -math.inf, 2.0**-63, 2.0**57):
        roots = remembered(problem, root)
        assert torch.equal(bits(run(problem, lying(arithmetic, tile), pack=roots)), bits(expected))
        after = roots.clone()
        assert torch.equal(bits(run(problem, lying(arithmetic, tile), pack=roots)), bits(expected))
        assert torch.equal(after, roots)


@tiles
def test_what_slices_cannot_hold(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    problem = beyond_slices("bias", arithmetic, rng)
    run_checked(problem, lying(arithmetic, tile))
    run_checked(problem, lying(arithmetic, tile), pack=remembered(problem, 2.0**20))


@tiles
def test_integers_and_frames(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    check_integers("bias_relu", arithmetic, lying(arithmetic, tile), rng)
    check_frame(arithmetic, lying(arithmetic, tile), rng)


def test_rows_that_tma_refuses_are_refused(rng: torch.Generator) -> None:
    problem = make("bias", SPLIT, (64, 64, 66), DEVICE, rng)
    with pytest.raises(RuntimeError, match="rows are not whole 16 bytes"):
        run(problem, lying(SPLIT, 0))
