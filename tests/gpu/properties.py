"""What all families of kernels have in common: a class a property or several, from which the families' classes derive.

Those have the kernels, and the sizes at which something happens in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn
from epigemm.arguments import forms
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.planner import dry_runs
from tests.gpu.launching import (
    DEVICE,
    RAGGED,
    Kernel,
    Sizes,
    all_vectors,
    both,
    checked,
    every_kind,
    launch,
    matrix_alone,
    two_of_all_vectors,
    two_of_every_kind,
)
from tests.support import reference
from tests.support.cases import LINEAR, Operands, has_bias, poisoned, signed
from tests.support.formulas import formula
from tests.support.layouts import LAYOUTS
from tests.support.moments import assert_close, poison_free_memory
from tests.support.problems import Problem, formula_of, make

epilogues = pytest.mark.parametrize("name", LINEAR)
LEADS: list[tuple[tuple[int, ...], int, int]] = [
    ((1, 1), 8, 8),
    ((4, 75), 264, 72),
    ((65, 2), 392, 200),
    ((3, 1, 43), 136, 64),
    ((2, 5, 13), 96, 520),
]
"""Leading axes of x, N and K."""


class OfKernels:
    """The parameters of a family.

    Attributes:
        kernels: that a test called with `kernel` runs, one after the other.
        sizes: ragged tiles, and what is special to the family.
        in_order: sizes with many tiles.
        depths: K of fewer stages than are in flight, of as many and of more.
        lying: names of `LAYOUTS` that the kernels read as they are.
    """

    kernels: ClassVar[Sequence[Kernel]]
    sizes: ClassVar[Sequence[Sizes]]
    in_order: ClassVar[Sequence[Sizes]] = ((700, 1160, 200),)
    depths: ClassVar[Sequence[int]]
    lying: ClassVar[Sequence[str]] = ("padded_rows", "every_second_row")


class Values(OfKernels):
    @epilogues
    def test_every_tile(self, name: str, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in [each for each in self.sizes if kernel.fits(each[2])]:
            for swizzle in (1, 4):
                checked(make(name, kernel.arithmetic, sizes, rng), kernel, swizzle % 2, swizzle)

    def test_lengths_of_k(self, kernel: Kernel, rng: torch.Generator) -> None:
        for k in [each for each in self.depths if kernel.fits(each)]:
            checked(make("bias", kernel.arithmetic, (130, 136, k), rng), kernel)


class Family(Values):
    def test_every_raster_and_swizzle(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Which tile is computed when must not matter: the same bits for every order."""
        for name in LINEAR:
            for sizes in self.in_order:
                problem = make(name, kernel.arithmetic, sizes, rng)
                first = checked(problem, kernel)
                for raster in (0, 1):
                    for swizzle in (1, 2, 4, 8):
                        assert torch.equal(launch(problem, kernel, raster, swizzle), first)

    @epilogues
    def test_integers_are_exact(self, name: str, kernel: Kernel, rng: torch.Generator) -> None:
        """Sums of whole numbers are exact, and what follows them is where it is representable."""
        problem = make(name, kernel.arithmetic, (300, 520, 1024), rng, whole=True)
        assert_exact(problem, launch(problem, kernel, 0, 2))

    def test_nothing_is_written_beside_the_result(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Stores are clipped at the edge of the output, not of its tile."""
        assert_frame_stays(make("bias", kernel.arithmetic, (130, 136, 64), rng), kernel)

    @epilogues
    def test_operands_of_the_registry(self, name: str, kernel: Kernel, rng: torch.Generator) -> None:
        """Without a bias, numbers in tensors, vectors that begin anywhere."""
        sizes = (256, 256, 128)
        for with_bias in {has_bias(name), False}:
            for in_tensors in (True, False):
                problem = make(
                    name, kernel.arithmetic, sizes, rng, with_bias=with_bias, tensor_scalars=in_tensors
                )
                checked(problem, kernel)
                problem.operands = problem.operands.map(LAYOUTS["misaligned"])
                checked(problem, kernel)

    def test_where_matrices_lie(self, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in (self.sizes[-1], (130, 200, 256)):
            problem = make("bias_relu", kernel.arithmetic, sizes, rng)
            expected = checked(problem, kernel)
            x, weight = problem.x, problem.weight
            for layout in self.lying:
                lying = LAYOUTS[layout]
                for problem.x, problem.weight in (
                    (lying(x), weight),
                    (x, lying(weight)),
                    (lying(x), lying(weight)),
                ):
                    assert torch.equal(launch(problem, kernel), expected), layout

    @pytest.mark.parametrize("gap", [0, 8, 2, 3])
    def test_operands_of_every_kind(self, kernel: Kernel, gap: int, rng: torch.Generator) -> None:
        """`gap`: behind a matrix's rows: none, and such that TMA, loads of pairs or only single loads may bring it."""
        for sizes in [(1, 8, 8), (300, 264, 72), (130, 392, 200)]:
            for function, wide in ((every_kind, ("factor", "more")), (matrix_alone, ()), (all_vectors, ())):
                checked(make(function, kernel.arithmetic, sizes, rng, wide=wide, gap=gap), kernel)


def assert_exact(problem: Problem, found: Tensor) -> None:
    """The result of sums of whole numbers, which lose nothing."""
    acc = problem.x.double() @ problem.weight.double().mT
    assert float(acc.abs().max()) <= 256, "not representable in bf16: choose a smaller K"
    exact = reference.Bounded(acc, torch.zeros_like(acc))
    bounded = reference.after_epilogue(problem.name, exact, problem.operands, problem.arithmetic)
    reference.assert_within(found, bounded)
    if torch.equal(bounded.expected, (bounded.expected * 2).round() / 2):
        assert torch.equal(found, bounded.expected.to(found.dtype))


def assert_frame_stays(problem: Problem, kernel: Kernel) -> None:
    """The result is written into the middle of other numbers."""
    frame = torch.full((300, 512), 5.0, dtype=kernel.dtype, device=DEVICE)
    out = frame[8 : 8 + len(problem.x), 16 : 16 + len(problem.weight)]
    out.fill_(math.nan)
    checked(problem, kernel, out=out)
    out.fill_(5.0)
    assert bool((frame == 5.0).all())


class RowsAlone(OfKernels):
    def test_a_row_does_not_depend_on_the_others(self, kernel: Kernel, rng: torch.Generator) -> None:
        """The same plan adds in the same order."""
        whole = make("bias_gelu", kernel.arithmetic, (300, 264, 1032), rng)
        every = checked(whole, kernel)
        for rows in (1, 17, 128):
            part = Problem(whole.name, kernel.arithmetic, whole.x[:rows], whole.weight, whole.operands)
            assert torch.equal(launch(part, kernel), every[:rows])


# --- matrices with a row for several of the result's ------------------------------------------------------------------


def of_text(text: str) -> epigemm.UserEpilogue:
    made: epigemm.UserEpilogue = epigemm.epilogue(formula(text))
    return made


# TMA loads the residual, the first matrix or the second one.
gate_last = of_text("acc, bias: PerColumn, residual: Matrix, gate: Matrix -> residual + gate * (acc + bias)")
gate_first = of_text("acc, gate: Matrix, bias: PerColumn, residual: Matrix -> residual + gate * (acc + bias)")
modulated = of_text("acc, scale: Matrix, shift: Matrix -> acc * (1 + scale) + shift")
gate_alone = of_text("acc, gate: Matrix -> acc * gate")


class SharedRows(OfKernels):
    """Such as a gate `[B, 1, N]` of each batch."""

    @pytest.mark.parametrize("gap", [0, 2, 3])
    def test_shared_rows(self, kernel: Kernel, gap: int, rng: torch.Generator) -> None:
        """`gap`: behind a gate's rows, so that pairs of it lie aligned, or do not."""
        dtype = kernel.dtype

        def random(*shape: int, of: torch.dtype = dtype, gap: int = 0) -> Tensor:
            return signed((*shape[:-1], shape[-1] + gap), rng).to(DEVICE, of)[..., : shape[-1]]

        for lead, n, k in [each for each in LEADS if kernel.fits(each[2])]:
            x, weight, bias, residual = random(*lead, k), random(n, k), random(n), random(*lead, n)
            for kept in range(len(lead)):
                of_batch = (*lead[:kept], *(1,) * (len(lead) - kept), n)
                gate, scale = random(*of_batch, gap=gap), random(*of_batch, of=torch.float32, gap=gap)
                for function, operands in (
                    (gate_last, [bias, residual, gate]),
                    (gate_first, [gate, bias, residual]),
                    (gate_alone, [gate]),
                    (modulated, [scale, gate]),
                ):
                    check_shared(function, x, weight, operands, kernel)


def check_shared(
    function: epigemm.UserEpilogue, x: Tensor, weight: Tensor, operands: list[Tensor], kernel: Kernel
) -> None:
    """A launch with x's leading axes."""
    spec = forms.of_types(function.traced, x, operands)
    out = poisoned((*x.shape[:-1], len(weight)), x.dtype, DEVICE)
    arithmetic = "ieee" if x.dtype.itemsize == 2 else kernel.arithmetic.name
    call = LinearCall(spec, x, kernel.lay(weight), operands, out=out)
    resolve.linear(call, (dry_runs.ARITHMETICS.index(arithmetic), *kernel.plan()))
    given = Operands(None, operands)
    Problem(spec.name, kernel.arithmetic, x, weight, given, formula_of(function)).check(out)


# --- results beside the result ----------------------------------------------------------------------------------------


@epigemm.epilogue
def gelu_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return torch.nn.functional.gelu(z), z


gelu_after = of_text("acc, bias: PerColumn -> F.gelu(acc + bias)")
sum_alone = of_text("acc, bias: PerColumn -> acc + bias")


class SecondValues(OfKernels):
    """A second value is stored for each element."""

    @pytest.mark.parametrize("function", [two_of_every_kind, two_of_all_vectors], ids=lambda f: f.traced.name)
    def test_second_values(
        self, function: epigemm.ResultsEpilogue, kernel: Kernel, rng: torch.Generator
    ) -> None:
        for sizes in [each for each in RAGGED if kernel.fits(each[2])]:
            problem = make(function, kernel.arithmetic, sizes, rng)
            found = both(function, problem, kernel)
            for place, one in enumerate(found):
                reference.assert_within(one, problem.expected(formula_of(function, place)))
            for one, other in zip(found, both(function, problem, kernel), strict=True):
                assert torch.equal(one, other), "two runs"

    def test_the_bits_are_those_of_one_value(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Also where the result's rows have gaps, which the stored matrix has not."""
        for sizes in [each for each in RAGGED if kernel.fits(each[2])]:
            problem = make(gelu_beside, kernel.arithmetic, sizes, rng)
            wanted = []
            for function in (gelu_after, sum_alone):
                alone = make(function, kernel.arithmetic, sizes, rng)
                alone.x, alone.weight, alone.operands = problem.x, problem.weight, problem.operands
                wanted.append(launch(alone, kernel))
            registry = Problem(
                "bias_gelu",
                kernel.arithmetic,
                problem.x,
                problem.weight,
                Operands(problem.operands.tensors[0]),
            )
            registry.check(wanted[0])
            for gap in (0, 8):
                found = both(gelu_beside, problem, kernel, gap=gap)
                assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]), (sizes, gap)

    def test_again_and_again(self, kernel: Kernel, rng: torch.Generator) -> None:
        """The same bits at each of many launches in a row, whatever other kernels left behind."""
        problem = make(two_of_every_kind, kernel.arithmetic, (2049, 1544, 1000), rng)
        first = both(two_of_every_kind, problem, kernel)
        for _ in range(5):
            for one, other in zip(first, both(two_of_every_kind, problem, kernel), strict=True):
                assert torch.equal(one, other)


def with_statistics(
    problem: Problem, kernel: Kernel | list[int], raster: int = 0, swizzle: int = 1, *, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """The result, and the mean and the variance of its columns."""
    m, n = len(problem.x), len(problem.weight)
    columns = torch.full((2, n), math.nan, device=DEVICE)
    out = poisoned((m, n + gap), problem.x.dtype, DEVICE)[:, :n]
    poison_free_memory(DEVICE, 1 + (m * n >> 18))
    return launch(problem, kernel, raster, swizzle, out=out, moments=columns), columns


def check_statistics(
    problem: Problem, kernel: Kernel | list[int], raster: int = 0, swizzle: int = 1, *, gap: int = 0
) -> Tensor:
    """Against those of the result, twice with the same bits; the result is that without statistics."""
    (out, columns), (again, others) = (
        with_statistics(problem, kernel, raster, swizzle, gap=gap) for _ in range(2)
    )
    assert_close(out, *columns)
    assert torch.equal(out, again) and torch.equal(columns, others), "two runs"
    assert torch.equal(out, launch(problem, kernel, raster, swizzle))
    return out


def offset(problem: Problem, by: float) -> Problem:
    """With another mean of the columns."""
    assert problem.operands.bias is not None
    problem.operands.bias += by
    return problem


class Statistics(OfKernels):
    """The mean and the variance of the result's columns, by the kernel that computes the result."""

    def test_statistics(self, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in RAGGED:
            problem = make("bias", kernel.arithmetic, sizes, rng)
            for raster, swizzle in ((0, 8), (1, 1)):
                check_statistics(problem, kernel, raster, swizzle)

    def test_statistics_of_a_large_mean(self, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in ((1000, 264, 64), (333, 200, 128)):
            problem = make("bias", kernel.arithmetic, sizes, rng)
            check_statistics(offset(problem, 1e4), kernel)
            check_statistics(problem, kernel, gap=24)

    def test_statistics_again_and_again(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, (2049, 1544, 1000), rng)
        for _ in range(3):
            check_statistics(problem, kernel)
