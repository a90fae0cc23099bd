"""The large tiles that multiply x by two weights: against float64, and against two kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import typed
from tests.gpu.launching import Frame, Kernel, Sizes, gated, in_float64, launch, random
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
        self.x = random(m, k, dtype=kernel.dtype)
        weights = random(2 * n, k, dtype=kernel.dtype).chunk(2)
        self.weights = weights if halves else [each.clone() for each in weights]
        self.products = [self.x.double() @ weight.double().t() for weight in self.weights]
        magnitudes = [self.x.double().abs() @ weight.double().abs().t() for weight in self.weights]
        self.errors = [SUMS * each for each in magnitudes]

    def run(
        self,
        name: str,
        operands: list[Tensor],
        order: tuple[int, int] = (0, 1),
        scalars: tuple[float, ...] = (),
    ) -> Tensor:
        """Nothing is written beside the result."""
        first, second = self.weights
        given, frame = Operands(None, operands, list(scalars)), Frame(*self.shape, self.kernel.dtype)
        problem = Problem(name, self.kernel.arithmetic, self.x, first, given)
        launch(problem, self.kernel, *order, out=frame.inner, weight2=second)
        return frame.taken()


def check(found: Tensor, expected: Tensor, by_sums: Tensor) -> None:
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
        ragged = (
            (129, 264, 136),
            (1, 8, 8),
            (200, 96, 64),
            (384, 512, 2000),
            (3333, 1032, 264),
            (1000, 3000, 72),
        )
        for sizes in ragged:
            for order in ((0, 8), (1, 1)):
                pair = Pair(sizes, kernel, halves=halves)
                biases = [random(sizes[1], dtype=kernel.dtype) for _ in range(2)]
                found = pair.run(name, biases, order)
                both = [z + bias.double() for z, bias in zip(pair.products, biases, strict=True)]
                check(found, *gated(silu, both, pair.errors))

    @pytest.mark.parametrize("gap", [0, 8, 1], ids=["by TMA", "rows with gaps", "rows that TMA refuses"])
    def test_a_matrix_beside_the_second_product(self, kernel: Kernel, gap: int) -> None:
        """TMA brings it, as it does an epilogue's only matrix, or threads read it."""
        m, n, k = 333, 424, 200
        pair = Pair((m, n, k), kernel)
        a, b, r, wide = (random(*shape, dtype=kernel.dtype) for shape in ((n,), (n,), (m, 1), (m, n + gap)))
        residual = wide[:, :n]
        name = typed(full_pair.traced, (False,) * 5 + (True,)).name
        found = pair.run(name, [a, b, r, residual], scalars=(0.75,))
        first, second = pair.products
        errors = [pair.errors[0], pair.errors[1] * r.double().abs()]
        product, by_sums = gated(torch.relu, (first + a.double(), second * r.double() + b.double()), errors)
        # The sum of two numbers of opposite signs is small; the roundings of both are not.
        by_sums += torch.finfo(kernel.dtype).eps / 2 * product.abs()
        expected = in_float64(full_pair, first, a, b, r, second, residual, scalars=(0.75,))
        check(found, expected, by_sums)

    def test_the_same_as_two_kernels(self, kernel: Kernel) -> None:
        """The second product rounded to a matrix, and a fused kernel that reads it: as far apart as that rounding."""
        pair = Pair((700, 520, 512), kernel)
        name = typed(FUNCTIONS["gated_relu"], (False, False)).name
        gate = torch.mm(pair.x, pair.weights[1].t())
        behind = Problem(name, kernel.arithmetic, pair.x, pair.weights[0], Operands(None, [gate]))
        two = launch(behind, plans.numbers(plans.TMA)).double()
        _, by_sums = gated(torch.abs, pair.products, pair.errors)
        check(pair.run(name, []), two, 0.5 * torch.finfo(kernel.dtype).eps * two.abs() + by_sums)

    def test_again_and_again(self, kernel: Kernel) -> None:
        """The same bits at each of many launches in a row, whatever other kernels left behind."""
        pair = Pair((2049, 1544, 1000), kernel)
        name = typed(FUNCTIONS["gated_silu"], (False, False)).name
        first = pair.run(name, [])
        for _ in range(50):
            assert torch.equal(pair.run(name, []), first)
