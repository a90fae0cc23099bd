"""The split and scaled kernels as tests run them: with a plan of their choice, through poisoned memory."""

from __future__ import annotations

import dataclasses
import math

import torch

from benchmarks.gradings import products
from tests.support import plans, reference
from tests.support.arithmetic import FP32, SCALED, SPLIT, TF32, Arithmetic
from tests.support.cases import draw_operands
from tests.support.problems import Problem, make, ternary
from tests.support.reference import Bounded, after_epilogue, assert_within
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
    assert_within(actual, dataclasses.replace(found[0], tolerance=widest))


def check_integers(name: str, arithmetic: Arithmetic, plan: list[int], rng: torch.Generator) -> None:
    """Sums of whole numbers are exact, and what follows them is where it is representable."""
    m, n, k = 300, 520, 1024
    x, weight = (ternary((rows, k), rng).to("cuda", arithmetic.dtype) for rows in (m, n))
    operands = draw_operands(name, n, arithmetic, x.device, rng)
    operands = operands.map(lambda tensor: ternary(tuple(tensor.shape), rng).to(tensor))
    operands.scalars = [2.0 for _ in operands.scalars]
    actual = run(Problem(name, arithmetic, x, weight, operands), plan)
    acc = x.double() @ weight.double().mT
    bounded = after_epilogue(name, Bounded(acc, torch.zeros_like(acc)), operands, arithmetic)
    assert_within(actual, bounded)
    if torch.equal(bounded.expected, (bounded.expected * 2).round() / 2):
        assert torch.equal(actual, bounded.expected.to(arithmetic.dtype))


def check_frame(arithmetic: Arithmetic, plan: list[int], rng: torch.Generator) -> None:
    """Nothing is written beside the result, also where elements are computed again."""
    for spoiled in (False, True):
        problem = make("bias", arithmetic, (130, 136, 64), torch.device("cuda"), rng)
        if spoiled:
            problem.x[-1, -1], problem.weight[-1, 0] = math.inf, math.nan
        frame = torch.full((300, 512), 5.0, dtype=arithmetic.dtype, device="cuda")
        out = frame[8:138, 16:152]
        out.fill_(math.nan)
        run(problem, plan, out=out)
        problem.check(out, second_path=False)
        out.fill_(5.0)
        assert bool((frame == 5.0).all())


def beyond_slices(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> Problem:
    """With elements that are not finite, and rows whose range slices cannot hold."""
    problem = make(name, arithmetic, (300, 264, 200), torch.device("cuda"), rng)
    problem.x[5, 7], problem.x[299, 199], problem.weight[200, 0] = math.inf, math.nan, -math.inf
    problem.x[100] *= 2.0**-40
    problem.x[100, 3] = 1.0
    problem.weight[:, 3] *= 2.0**-60
    return problem
