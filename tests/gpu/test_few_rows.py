"""fp32 in multiply-adds: few rows of x, or of the weight."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.launching import (
    Frame,
    Kernel,
    Sizes,
    both,
    captured,
    checked,
    every_kind,
    every_tile,
    launch,
    two_of_every_kind,
)
from tests.gpu.properties import check_statistics
from tests.support import plans, reference
from tests.support.arithmetic import FP32
from tests.support.cases import LINEAR
from tests.support.layouts import LAYOUTS
from tests.support.problems import formula_of, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

FEW = (1, 4, 8, 16)
"""Rows of the tiles (csrc/gemm/sm90_few_rows/tiles.h)."""
STAGE = 512
KERNELS = every_tile(plans.FEW_ROWS, [FP32], splits=(1, 2, 4, 8))
of_every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)


def sizes_of(kernel: Kernel) -> list[Sizes]:
    """Full and ragged tiles; K of whole vectors and not, and of as many stages as parts, and more."""
    few, least = FEW[kernel.tile], (kernel.splits - 1) * STAGE
    found = []
    for rows in {few, max(1, few - 1), few // 2 + 1}:
        for many, k in ((129, 8), (1000, 516), (33, 1031), (640, 2048), (50, 4100)):
            found += [(rows, many, least + k), (many, rows, least + k)]
    return found


@pytest.mark.parametrize("name", LINEAR)
@of_every_kernel
def test_every_epilogue(name: str, kernel: Kernel, rng: torch.Generator) -> None:
    for sizes in sizes_of(kernel):
        checked(make(name, FP32, sizes, rng), kernel)


@of_every_kernel
def test_operands_of_every_kind(kernel: Kernel, rng: torch.Generator) -> None:
    for sizes in sizes_of(kernel):
        checked(make(every_kind, FP32, sizes, rng), kernel)
        problem = make(two_of_every_kind, FP32, sizes, rng)
        for place, one in enumerate(both(two_of_every_kind, problem, kernel)):
            reference.assert_within(one, problem.expected(formula_of(two_of_every_kind, place)))


@of_every_kernel
def test_rows_that_lie_anywhere(kernel: Kernel, rng: torch.Generator) -> None:
    """By vectors or one by one: the same sums, in another order."""
    for layout in ("padded_rows", "odd_rows", "every_second_row", "misaligned"):
        for sizes in sizes_of(kernel)[:6]:
            problem = make("bias_relu", FP32, sizes, rng)
            x, weight = problem.x, problem.weight
            for problem.x, problem.weight in ((LAYOUTS[layout](x), weight), (x, LAYOUTS[layout](weight))):
                checked(problem, kernel)


@of_every_kernel
def test_again_and_again(kernel: Kernel, rng: torch.Generator) -> None:
    """Equal bits, also in a graph whose weight is written between replays; nothing is written beside the result."""
    problem = make("bias_gelu", FP32, (FEW[kernel.tile], 5000, 4096), rng)
    first = checked(problem, kernel)
    for _ in range(20):
        assert torch.equal(launch(problem, kernel), first)
    out = torch.empty_like(first)
    graph = captured(lambda: launch(problem, kernel, out=out))
    problem.weight.mul_(-0.5)
    graph.replay()
    assert torch.equal(out, checked(problem, kernel))
    frame = Frame(len(out), 5000, torch.float32)
    launch(problem, kernel, out=frame.result)
    assert torch.equal(frame.taken(), out)


@of_every_kernel
def test_special_values_stay_in_their_row(kernel: Kernel, rng: torch.Generator) -> None:
    """The last element of a ragged K too: behind it nothing is multiplied."""
    for k in (kernel.splits * STAGE + 4, kernel.splits * STAGE + 3):
        problem = make("bias", FP32, (FEW[kernel.tile], 200, k), rng)
        for row, column, value in ((3, 5, math.nan), (77, k - 1, math.inf), (199, k - 1, -math.inf)):
            problem.weight[row, column] = value
        problem.x[:, k - 1] = problem.x[:, k - 1].abs() + 1
        found = launch(problem, kernel)
        assert found[:, 3].isnan().all()
        assert (found[:, 77] == math.inf).all() and (found[:, 199] == -math.inf).all()
        kept = [n for n in range(200) if n not in (3, 77, 199)]
        problem.weight[[3, 77, 199]] = 0
        assert torch.equal(found[:, kept], checked(problem, kernel)[:, kept])


@of_every_kernel
def test_statistics(kernel: Kernel, rng: torch.Generator) -> None:
    check_statistics(make("bias_relu", FP32, (FEW[kernel.tile], 264, 4096), rng), kernel)


@of_every_kernel
def test_refused(kernel: Kernel, rng: torch.Generator) -> None:
    few = FEW[kernel.tile]
    with pytest.raises(RuntimeError, match=f"plan: the tile has {few} rows|at most 16 rows"):
        launch(make("bias", FP32, (few + 1, 64, 4096), rng), kernel)
    if kernel.splits > 1:
        with pytest.raises(RuntimeError, match=f"plan: K is too short for {kernel.splits} splits"):
            launch(make("bias", FP32, (few, 64, 64), rng), kernel)
