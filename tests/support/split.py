"""The split and scaled kernels as tests run them: with a plan of their choice, through poisoned memory."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.gradings import products
from tests.support import plans, reference
from tests.support.arithmetic import FP32, SCALED, SPLIT, TF32, Arithmetic
from tests.support.problems import Problem
from tests.support.watching import poisoned_memory


def tile_count(arithmetic: Arithmetic) -> int:
    """How many tiles the kernels of one arithmetic are built with (0 without the GEMM kernels)."""
    return plans.tile_count(plans.FP16X3, arithmetic.name)


def plan(tile: int = 0, raster: int = 0, swizzle: int = 1) -> list[int]:
    """One of theirs."""
    return plans.numbers(plans.FP16X3, tile, raster, swizzle)


def every_tile() -> list[tuple[Arithmetic, int]]:
    """Each tile of each arithmetic; one of each where none is built, so that a skipped test is seen."""
    return [(a, tile) for a in (SPLIT, SCALED) for tile in range(max(tile_count(a), 1))]


def make_pack(problem: Problem, arithmetic: Arithmetic | None = None) -> torch.Tensor:
    """The weight, split for keeping."""
    return products.make_pack(problem.weight, (arithmetic or problem.arithmetic).name)


def run(
    problem: Problem,
    plan: list[int],
    *,
    pack: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels alone; workspace and output hold NaN before."""
    with poisoned_memory():
        return products.forced_into(
            problem.out() if out is None else out,
            problem.name,
            problem.x,
            problem.weight,
            problem.arithmetic.name,
            bias=problem.operands.bias,
            operands=problem.operands.tensors,
            scalars=problem.operands.scalars,
            plan=plan,
            pack=pack,
        )


def run_checked(problem: Problem, plan: list[int], *, pack: torch.Tensor | None = None) -> torch.Tensor:
    """`run`, held against float64."""
    actual = run(problem, plan, pack=pack)
    problem.check(actual, second_path=False)
    return actual


def check_public(problem: Problem, actual: torch.Tensor) -> None:
    """A result of the public op, which may have taken the kernels or torch's product: each has its bound."""
    other = FP32 if problem.arithmetic is SPLIT else TF32
    roads = [(problem.arithmetic, False), (other, True)]
    found = [
        reference.linear(
            problem.name, problem.x, problem.weight, problem.operands, arithmetic, second_path=second
        )
        for arithmetic, second in roads
    ]
    widest = torch.maximum(found[0].tolerance, found[1].tolerance)
    reference.assert_within(actual, dataclasses.replace(found[0], tolerance=widest))
