"""Launches of single kernels: which there are, what they are given, and how results are compared with float64.

`tests.support.problems.make` draws a `Problem`, which `launch` runs under a kernel's plan and `checked` holds against
`tests.support.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import products
from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue, Scalar, UserEpilogue
from epigemm.epilogues.registry import typed
from tests.support import plans
from tests.support.arithmetic import Arithmetic
from tests.support.cases import Operands, poisoned
from tests.support.problems import Problem, formula_of
from tests.support.reference import evaluate
from tests.support.watching import poisoned_memory

DEVICE = torch.device("cuda")
Sizes = tuple[int, int, int]
RAGGED: list[Sizes] = [
    # M, N, K: one row, ragged blocks and tiles, one stage of K and less, and more tiles than multiprocessors
    *((1, 8, 64), (63, 200, 64), (65, 264, 136), (129, 8, 8), (1000, 200, 72), (3333, 1032, 264)),
    *((2048, 4096, 512), (65, 264, 1032)),
]
cuda: Any = torch.cuda


class Kernel(NamedTuple):
    """A tile of a family, what it computes in, how many CTAs share the K of a tile, and the weight's order."""

    family: str
    tile: int
    arithmetic: Arithmetic
    splits: int = 1
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.arithmetic.dtype

    def plan(self, raster: int = 0, swizzle: int = 1) -> list[int]:
        return plans.numbers(self.family, self.tile, raster, swizzle, self.splits)

    @property
    def reads_weight(self) -> bool:
        """Whether it reads an fp32 weight as it lies."""
        return self.family == plans.FP16X3 and self.tile >= plans.tile_count(
            self.family, self.arithmetic.name
        )

    def fits(self, k: int) -> bool:
        """Whether each part of K has a stage."""
        return self.splits <= -(-k // 64)

    def __str__(self) -> str:
        parts, order = f"-{self.splits}" * (self.splits > 1), "-transposed" * self.transposed
        return f"{self.family}-{self.tile}-{self.arithmetic.name}{parts}{order}"

    def lay(self, weight: Tensor) -> Tensor:
        """The weight as the kernel reads it: a copy whose columns are whole 16 bytes, if it is transposed."""
        if not self.transposed:
            return weight
        columns = weight.new_full((weight.shape[1], -(-weight.shape[0] // 4) * 4), 7.0)
        return columns[:, : weight.shape[0]].copy_(weight.mT).mT


def every_tile(
    family: str,
    arithmetics: Collection[Arithmetic],
    *,
    splits: Sequence[int] = (1,),
    only: Collection[int] | None = None,
) -> tuple[Kernel, ...]:
    """Every tile that is built; one where none is, so that a skipped test is seen."""
    found = tuple(
        Kernel(family, tile, arithmetic, parts)
        for arithmetic in arithmetics
        for tile in range(plans.tile_count(family, counted_as(arithmetic)))
        for parts in splits
        if only is None or tile in only
    )
    return found or (Kernel(family, 0, next(iter(arithmetics))),)


def as_it_lies(arithmetics: Collection[Arithmetic], splits: Sequence[int] = (1,)) -> tuple[Kernel, ...]:
    """The tiles that read an fp32 weight as it lies, behind those on slices of it; one where none is built.

    Of either order of the weight. CTAs do not share K in the tile of 256 rows.
    """
    found = tuple(
        Kernel(
            plans.FP16X3,
            plans.tile_count(plans.FP16X3, arithmetic.name) + tile,
            arithmetic,
            parts,
            transposed,
        )
        for arithmetic in arithmetics
        for tile in range(plans.tile_count(plans.FP16X3, f"{arithmetic.name}_as_it_lies"))
        for parts in splits
        if parts == 1 or tile > 0 or arithmetic.name == "split"
        for transposed in (False, True)
    )
    return found or (Kernel(plans.FP16X3, 0, next(iter(arithmetics))),)


def counted_as(arithmetic: Arithmetic) -> str:
    """The name under which a family's tiles are counted."""
    of_fp32 = "tf32" if arithmetic.name == "ieee" else arithmetic.name
    return "16_bits" if arithmetic.dtype.itemsize == 2 else of_fp32


def launch(
    problem: Problem,
    kernel: Kernel | Sequence[int],
    raster: int = 0,
    swizzle: int = 1,
    *,
    out: Tensor | None = None,
    **beside: Any,
) -> Tensor:
    """The kernel alone, or what a plan in numbers is; workspace and result hold NaN before.

    `beside`: of `forced_into`, such as the matrix that receives second values.
    """
    arithmetic = problem.arithmetic.name if problem.arithmetic.dtype.itemsize == 4 else "ieee"
    given = problem.operands
    with poisoned_memory():
        return products.forced_into(
            problem.out() if out is None else out,
            problem.name,
            problem.x,
            kernel.lay(problem.weight) if isinstance(kernel, Kernel) else problem.weight,
            arithmetic,
            bias=given.bias,
            operands=given.tensors,
            scalars=given.scalars,
            plan=kernel.plan(raster, swizzle) if isinstance(kernel, Kernel) else kernel,
            **beside,
        )


def checked(
    problem: Problem, kernel: Kernel | Sequence[int], raster: int = 0, swizzle: int = 1, **beside: Any
) -> Tensor:
    """The same, held against float64; and again, where it may matter which of several CTAs ends last."""
    found = launch(problem, kernel, raster, swizzle, **beside)
    problem.check(found)
    if isinstance(kernel, Kernel) and kernel.splits > 1:
        again = launch(problem, kernel, raster, swizzle, **beside)
        assert torch.equal(again.view(torch.uint8), found.view(torch.uint8)), "two runs"
    return found


class Frame:
    """A matrix of NaN for a result, within a larger one of which nothing else may be written.

    `written`: so many of its rows; None: all.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, *, written: int | None = None) -> None:
        step = 16 // dtype.itemsize  # rows are whole 16 bytes
        sizes = (rows + 9, columns + -columns % step + 2 * step)
        self.around = torch.full(sizes, 5.0, device=DEVICE).to(dtype)
        self.inner = self.around[1 : rows + 1, step : columns + step]
        self.result = self.inner[:written]
        self._fill(math.nan)

    def _fill(self, value: float) -> None:
        self.result.copy_(torch.full((), value, device=DEVICE))

    def taken(self) -> Tensor:
        """What was written, if nothing was elsewhere."""
        found = self.result.clone()
        self._fill(5.0)
        assert bool((self.around.float() == 5.0).all()), "something was written outside of the result"
        return found


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what a call launches, which has run before on a stream of its own."""
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        call()
    cuda.current_stream().wait_stream(side)
    graph: torch.cuda.CUDAGraph = cuda.CUDAGraph()
    with cuda.graph(graph):
        call()
    return graph


# --- what calls without a `Problem` give: of 8 bits, of pairs of products, of rows in groups --------------------------


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Not too large for fp16, whatever is multiplied."""
    return (torch.randn(shape, device=DEVICE) / 4).to(dtype)


def in_float64(
    function: UserEpilogue, acc: Tensor, *tensors: Tensor, scalars: Sequence[float] = ()
) -> Tensor:
    """What a function of a user gives of a product in float64."""
    return evaluate(formula_of(function), acc, Operands(None, list(tensors), list(scalars)))


def gated(
    activation: Callable[[Tensor], Tensor], products: Sequence[Tensor], errors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """activation(first) * second, and what the errors of both products make of it: SiLU and GELU are no steeper."""
    first, second = products
    activated = activation(first)
    return activated * second, 1.13 * second.abs() * errors[0] + activated.abs() * errors[1]


# --- functions of users ----------------------------------------------------------------------------------------------


@epigemm.epilogue
def every_kind(
    acc: Tensor, bias: PerColumn, factor: PerColumn, row: PerRow, other: Matrix, more: Matrix, by: Scalar
) -> Tensor:
    return (acc + bias) * row + factor * other + more * by


@epigemm.epilogue
def matrix_alone(acc: Tensor, other: Matrix) -> Tensor:
    return acc + other


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


@epigemm.epilogue
def two_of_every_kind(
    acc: Tensor, bias: PerColumn, factor: PerColumn, row: PerRow, other: Matrix, more: Matrix
) -> tuple[Tensor, Tensor]:
    """Each value reads what the other does not."""
    return (acc + bias) * row + more, acc - factor * other


@epigemm.epilogue
def two_of_all_vectors(
    acc: Tensor,
    bias: PerColumn,
    factor: PerColumn,
    shift: PerColumn,
    slope: PerColumn,
    row: PerRow,
    more: PerRow,
    other: Matrix,
) -> tuple[Tensor, Tensor]:
    return (acc + bias) * row + factor * other, acc + shift + slope * more


def both(
    function: ResultsEpilogue,
    problem: Problem,
    kernel: Kernel,
    raster: int = 0,
    swizzle: int = 1,
    gap: int = 0,
) -> tuple[Tensor, Tensor]:
    """Both results of a function, in its order, by a kernel that stores them. `gap`: behind the rows of the result."""
    parts = function.parts(problem.x.dtype)
    pair = parts.pair
    assert pair is not None
    operands = Operands(None, [problem.operands.tensors[place] for place in pair.places])
    name = typed(pair.traced, [False] * len(pair.places)).name
    asked = Problem(name, problem.arithmetic, problem.x, problem.weight, operands)
    m, n = len(problem.x), len(problem.weight)
    out = poisoned((m, n + gap), problem.x.dtype, problem.x.device)[:, :n]
    stored = poisoned((m, n), problem.x.dtype, problem.x.device)
    found = {pair.result: launch(asked, kernel, raster, swizzle, out=out, stored=stored), pair.stored: stored}
    return found[parts.sources[0]], found[parts.sources[1]]
