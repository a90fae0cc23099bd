"""Public operators and functions on a GPU: any size and layout, by whichever kernel the planner chooses.

Strided tensors, leading dimensions and `out` of small products: tests/ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, Sizes, every_tile, launch
from tests.gpu.properties import assert_exact, epilogues
from tests.support import plans, reference
from tests.support.arithmetic import (
    ARITHMETICS,
    BF16,
    FP16,
    FP32,
    FP64,
    FUSED_ARITHMETICS,
    SPLIT,
    SPLIT_ARITHMETICS,
    TF32,
    Arithmetic,
)
from tests.support.cases import LINEAR, draw_operands
from tests.support.layouts import LAYOUTS
from tests.support.problems import EMPTY_SHAPES, Problem, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

BY_KERNELS = [*FUSED_ARITHMETICS, *SPLIT_ARITHMETICS]
fused = pytest.mark.parametrize("arithmetic", FUSED_ARITHMETICS, ids=lambda a: a.name)
by_kernels = pytest.mark.parametrize("arithmetic", BY_KERNELS, ids=lambda a: a.name)
arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)


def explained(problem: Problem) -> dict[str, Any]:
    found = dry_runs.dry_run(problem.call(problem.out()), tried=True)
    return found.tried[0].plan


def check(problem: Problem, actual: Tensor | None = None) -> None:
    """The public op may have taken a kernel or torch's product: each has its bound."""
    actual = problem.run() if actual is None else actual
    expected = problem.expected(second_path=problem.arithmetic not in SPLIT_ARITHMETICS)
    if problem.arithmetic in SPLIT_ARITHMETICS:
        other = FP32 if problem.arithmetic is SPLIT else TF32
        by_torch = dataclasses.replace(problem, arithmetic=other).expected(second_path=True)
        widest = torch.maximum(expected.tolerance, by_torch.tolerance)
        expected = reference.Bounded(expected.expected, widest)
    reference.assert_within(actual, expected)


@fused
@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 128, 129, 192, 200, 255, 257])
def test_tile_edges(arithmetic: Arithmetic, m: int, rng: torch.Generator) -> None:
    tiles = [each for family in (plans.TMA, plans.SWAP_AB) for each in every_tile(family, [arithmetic])]
    for name in LINEAR:
        for n in [8, 64, 120, 128, 136, 192, 200, 248, 256, 264]:
            problem = make(name, arithmetic, (m, n, 72), rng)
            actual = problem.run_fused()
            if actual is None:
                assert not explained(problem)["fused"]
                actual = launch(problem, tiles[n % len(tiles)])
            problem.check(actual)


@by_kernels
@pytest.mark.parametrize("size", [*(127, 128, 129, 255, 257, 64, 63, 192, 200), *(1, 5, 1025)])
def test_any_size(arithmetic: Arithmetic, size: int, rng: torch.Generator) -> None:
    """Odd N or K declines some kernels; whoever answers is right."""
    for name in LINEAR:
        for shape in [(size, 128, 64), (128, size, 64), (128, 128, size), (size, size + 2, size + 4)]:
            check(make(name, arithmetic, shape, rng))


@by_kernels
@pytest.mark.parametrize("shape", [*((2048, 2047, 2049), (2048, 4096, 4095)), *EMPTY_SHAPES], ids=str)
def test_large_and_empty(arithmetic: Arithmetic, shape: Sizes, rng: torch.Generator) -> None:
    for name in LINEAR:
        check(make(name, arithmetic, shape, rng))


@by_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(arithmetic: Arithmetic, layout: str, rng: torch.Generator) -> None:
    change = LAYOUTS[layout]
    for name in LINEAR:
        sizes = (1024, 2048, 2048)
        problem = make(name, arithmetic, sizes, rng, x_layout=change, weight_layout=change)
        check(problem)
        problem.operands = problem.operands.map(lambda v: v.repeat_interleave(2)[::2] if v.dim() else v)
        check(problem)


@epilogues
@arithmetics
@pytest.mark.parametrize("shape", [(40, 24, 200), (7, 9, 11), (128, 128, 256)], ids=str)
def test_integers_are_exact(name: str, arithmetic: Arithmetic, shape: Sizes, rng: torch.Generator) -> None:
    """Sums of -1, 0, 1 are exact in every arithmetic, also after the second path's rounding to 16 bits."""
    problem = make(name, arithmetic, shape, rng, whole=True)
    assert_exact(problem, problem.run())


@epilogues
@arithmetics
def test_sums_beyond_the_operands_precision(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """K ones sum to K in the accumulator even where K has no 16-bit neighbours: nothing adds in 16 bits."""
    k = 4096
    x, weight = torch.ones(2, 16, k, dtype=arithmetic.dtype, device=DEVICE)
    operands = draw_operands(name, 16, arithmetic, DEVICE, rng).map(torch.zeros_like)
    operands.tensors = [torch.ones_like(tensor) for tensor in operands.tensors]
    operands.scalars = [1.0 for _ in operands.scalars]
    acc = torch.full((16, 16), float(k), dtype=torch.float64, device=DEVICE)
    # The second path may round a product of 4096 plus an epilogue's own.
    rounded = reference.Bounded(acc, torch.full_like(acc, k * arithmetic.output_unit))
    found = Problem(name, arithmetic, x, weight, operands).run()
    reference.assert_within(found, reference.after_epilogue(name, rounded, operands, arithmetic))


@epilogues
@fused
def test_explain_says_fused_exactly_when_the_call_fuses(
    name: str, arithmetic: Arithmetic, rng: torch.Generator
) -> None:
    shapes = [(8192, 4096, 1024), (1, 8, 8), (16, 4096, 1024), (127, 128, 72), (64, 129, 64), (64, 128, 63)]
    found = []
    for shape in [*shapes, *EMPTY_SHAPES]:
        problem = make(name, arithmetic, shape, rng)
        plan, actual = explained(problem), problem.run_fused()
        assert plan["fused"] is (actual is not None), (shape, plan["why_not"])
        assert bool(plan["why_not"]) is (actual is None)
        if actual is not None:
            problem.check(actual)
        found.append(actual is not None)
    # A bias, and a ReLU behind it, PyTorch's GEMM adds too, and where both are as fast it keeps the call.
    assert found[0] or name in ("bias", "bias_relu"), "a large aligned problem must fuse"


COLUMNS = "every_second_column"
DECLINED: list[tuple[Arithmetic, Sizes, str, str]] = [
    *((arithmetic, (1024, 1024, 1024), "contiguous", "contiguous") for arithmetic in (FP32, FP64)),
    # Layouts that no kernel addresses, and that no copy mends (test_copies.py); TF32 has no copies.
    *(
        (TF32, (1024, 1024, 1024), each, "contiguous")
        for each in ("misaligned", "odd_rows", "transposed", COLUMNS)
    ),
    *(
        (TF32, (1024, 1024, 1024), "contiguous", each)
        for each in ("misaligned", "odd_rows", "transposed", COLUMNS)
    ),
    *((arithmetic, (1024, 1024, 1024), COLUMNS, "contiguous") for arithmetic in (BF16, FP16)),
    *((arithmetic, (1024, 1024, 1024), "contiguous", COLUMNS) for arithmetic in (BF16, FP16)),
    *(
        (TF32, sizes, "aligned_rows", "aligned_rows")
        for sizes in ((512, 512, 65), (512, 499, 64), (20, 18, 64))
    ),
]


@pytest.mark.parametrize(
    ("arithmetic", "sizes", "x", "weight"), DECLINED, ids=lambda v: getattr(v, "name", str(v))
)
def test_what_no_kernel_covers_is_declined_and_said(
    arithmetic: Arithmetic, sizes: Sizes, x: str, weight: str, rng: torch.Generator
) -> None:
    of_x, of_weight = LAYOUTS[x], LAYOUTS[weight]
    for name in LINEAR:
        problem = make(name, arithmetic, sizes, rng, x_layout=of_x, weight_layout=of_weight)
        assert problem.run_fused() is None, name
        plan = explained(problem)
        assert plan["fused"] is False and plan["why_not"], name
        check(problem)
