"""The large tiles that multiply x by two weights: against float64, and against two kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import typed
from tests.gpu.launching import DEVICE, Kernel, Sizes, launch
from tests.support import plans
from tests.support.arithmetic import BF16, FP16
from tests.support.cases import Operands
from tests.support.problems import Problem
from tests.support.reference import Bounded, assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

SUMS = 2.0**-14
"""Of the magnitudes of a sum: tensor cores truncate each of its additions to fp32, K up to 2,000 here."""


@epigemm.epilogue
def biased_pair(acc: Tensor, bias: PerColumn, bias2: PerColumn, gate: Matrix) -> Tensor:
    z = acc + bias
    result: Tensor = z * torch.sigmoid(z) * (gate + bias2)
    return result


@epigemm.epilogue
def full_pair(
    acc: Tensor, a: PerColumn, b: PerColumn, r: PerRow, gate: Matrix, residual: Matrix, s: Scalar
) -> Tensor:
    result: Tensor = torch.relu(acc + a) * (gate * r + b) + residual * s
    return result


class Pair:
    """Random operands, and what is expected of them."""

    def __init__(self, sizes: Sizes, kernel: Kernel, *, halves: bool = False) -> None:
        m, n, k = sizes
        self.kernel, self.shape = kernel, (m, n)
        self.x = self.random(m, k)
        self.weights = self.random(2 * n, k).chunk(2) if halves else (self.random(n, k), self.random(n, k))
        self.products = [self.x.double() @ weight.double().t() for weight in self.weights]
        self.magnitudes = [self.x.double().abs() @ weight.double().abs().t() for weight in self.weights]

    def random(self, *shape: int) -> Tensor:
        """Not too large for fp16, whatever is multiplied."""
        return (torch.randn(shape, device=DEVICE) / 4).to(self.kernel.dtype)

    def run(
        self,
        name: str,
        operands: list[Tensor],
        raster: int = 0,
        swizzle: int = 1,
        scalars: tuple[float, ...] = (),
    ) -> Tensor:
        """In a frame of numbers that stay."""
        m, n = self.shape
        first, second = self.weights
        problem = Problem(
            name, self.kernel.arithmetic, self.x, first, Operands(None, operands, list(scalars))
        )
        frame = torch.full((m + 3, n + 16), 5.0, dtype=self.kernel.dtype, device=DEVICE)
        out = frame[1 : m + 1, 8 : n + 8].fill_(float("nan"))
        found = launch(problem, self.kernel, raster, swizzle, out=out, weight2=second).clone()
        out.fill_(5.0)
        assert bool((frame == 5.0).all()), "written beside the result"
        return found

    def check(self, found: Tensor, expected: Tensor, by_sums: Tensor) -> None:
        """`by_sums`: the error of the sums in the result."""
        unit = torch.finfo(found.dtype).eps
        assert_within(found, Bounded(expected, unit * expected.abs() + by_sums + 2.0**-24))


class TestPairs:
    kernels = tuple(
        Kernel(plans.TMA, tile, arithmetic)
        for arithmetic in (FP16, BF16)
        for tile in range(plans.tile_count(plans.TMA, "pairs")) or [0]
    )

    @pytest.mark.parametrize("halves", [False, True], ids=["two weights", "halves of one"])
    def test_every_tile(self, kernel: Kernel, halves: bool) -> None:
        """Ragged tiles, a lone row, one stage of K and less, and more tiles than multiprocessors."""
        name = typed(biased_pair.traced, (False,) * 3).name
        for sizes in (
            (129, 264, 136),
            (1, 8, 8),
            (200, 96, 64),
            (384, 512, 2000),
            (3333, 1032, 264),
            (1000, 3000, 72),
        ):
            for raster, swizzle in ((0, 8), (1, 1)):
                pair = Pair(sizes, kernel, halves=halves)
                bias, bias2 = pair.random(sizes[1]), pair.random(sizes[1])
                found = pair.run(name, [bias, bias2], raster, swizzle)
                z, gate = pair.products[0] + bias.double(), pair.products[1] + bias2.double()
                silu = z * torch.sigmoid(z)
                by_sums = SUMS * (1.1 * gate.abs() * pair.magnitudes[0] + silu.abs() * pair.magnitudes[1])
                pair.check(found, silu * gate, by_sums)

    @pytest.mark.parametrize("gap", [0, 8, 1], ids=["by TMA", "rows with gaps", "rows that TMA refuses"])
    def test_a_matrix_beside_the_second_product(self, kernel: Kernel, gap: int) -> None:
        """TMA brings it, as it does an epilogue's only matrix, or threads read it."""
        m, n, k = 333, 424, 200
        pair = Pair((m, n, k), kernel)
        a, b, r, residual = pair.random(n), pair.random(n), pair.random(m, 1), pair.random(m, n + gap)[:, :n]
        name = typed(full_pair.traced, (False,) * 5 + (True,)).name
        found = pair.run(name, [a, b, r, residual], scalars=(0.75,))
        first, second = pair.products
        relu, gate = torch.relu(first + a.double()), second * r.double() + b.double()
        by_sums = SUMS * (gate.abs() * pair.magnitudes[0] + relu * r.double().abs() * pair.magnitudes[1])
        # The sum of two numbers of opposite signs is small; the roundings of both are not.
        by_sums += torch.finfo(kernel.dtype).eps / 2 * relu * gate.abs()
        pair.check(found, relu * gate + 0.75 * residual.double(), by_sums)

    def test_the_same_as_two_kernels(self, kernel: Kernel) -> None:
        """The second product rounded to a matrix, and a fused kernel that reads it: as far apart as that rounding."""
        pair = Pair((700, 520, 512), kernel)
        name = typed(FUNCTIONS["gated_relu"], (False, False)).name
        gate = torch.mm(pair.x, pair.weights[1].t())
        behind = Problem(name, kernel.arithmetic, pair.x, pair.weights[0], Operands(None, [gate]))
        two = launch(behind, plans.numbers(plans.TMA)).double()
        by_sums = pair.products[0].abs() * pair.magnitudes[1] + pair.magnitudes[0] * pair.products[1].abs()
        bound = 1.5 * torch.finfo(kernel.dtype).eps * two.abs() + SUMS * by_sums
        assert bool(((pair.run(name, []).double() - two).abs() <= bound).all())

    def test_again_and_again(self, kernel: Kernel) -> None:
        """The same bits at each of many launches in a row, whatever other kernels left behind."""
        pair = Pair((2049, 1544, 1000), kernel)
        name = typed(FUNCTIONS["gated_silu"], (False, False)).name
        first = pair.run(name, [])
        for _ in range(50):
            assert torch.equal(pair.run(name, []), first)
