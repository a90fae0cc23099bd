"""The kernels of pairs of products on a GPU, with forced plans: every tile against float64, and against two kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import products
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import typed
from tests.support import plans
from tests.support.cases import poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
TILES = range(plans.tile_count(plans.TMA, "pairs")) or [0]
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUMS = 2.0**-14
"""Of the magnitudes of a sum: tensor cores truncate each of its additions to fp32, K up to 2,000 here."""

tiles = pytest.mark.parametrize("tile", TILES)
types = pytest.mark.parametrize("dtype", EPSILON, ids=str)


@epigemm.epilogue
def biased_pair(acc: Tensor, bias: PerColumn, bias2: PerColumn, gate: Matrix) -> Tensor:
    """silu(acc + bias) * (gate + bias2)."""
    z = acc + bias
    result: Tensor = z * torch.sigmoid(z) * (gate + bias2)
    return result


@epigemm.epilogue
def full_pair(
    acc: Tensor, a: PerColumn, b: PerColumn, r: PerRow, gate: Matrix, residual: Matrix, s: Scalar
) -> Tensor:
    """relu(acc + a) * (gate * r + b) + residual * s."""
    result: Tensor = torch.relu(acc + a) * (gate * r + b) + residual * s
    return result


class Pair:
    """Random operands, and what is expected of them."""

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype, *, halves: bool = False) -> None:
        m, n, k = sizes
        self.dtype, self.shape = dtype, (m, n)
        self.x = self.random(m, k)
        self.weights = self.random(2 * n, k).chunk(2) if halves else (self.random(n, k), self.random(n, k))
        self.products = [self.x.double() @ weight.double().t() for weight in self.weights]
        self.magnitudes = [self.x.double().abs() @ weight.double().abs().t() for weight in self.weights]

    def random(self, *shape: int) -> Tensor:
        """Not too large for fp16, whatever is multiplied."""
        return (torch.randn(shape, device=DEVICE) / 4).to(self.dtype)

    def run(
        self, epilogue: str, operands: list[Tensor], plan: list[int], scalars: tuple[float, ...] = ()
    ) -> Tensor:
        """In a frame of numbers that stay, and in place of NaN."""
        m, n = self.shape
        frame = torch.full((m + 3, n + 16), 5.0, dtype=self.dtype, device=DEVICE)
        out = frame[1 : m + 1, 8 : n + 8].copy_(poisoned((m, n), self.dtype, DEVICE))
        first, second = self.weights
        products.forced_into(
            out,
            epilogue,
            self.x,
            first,
            "ieee",
            operands=operands,
            scalars=scalars,
            plan=plan,
            weight2=second,
        )
        found = out.clone()
        out.fill_(5.0)
        assert bool((frame == 5.0).all()), "written beside the result"
        return found

    def check(self, found: Tensor, expected: Tensor, by_sums: Tensor) -> None:
        """`by_sums`: the error of the sums in the result."""
        bound = 2 * EPSILON[self.dtype] * expected.abs() + by_sums + 2.0**-24
        wrong = ~((found.double() - expected).abs() <= bound)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first {wrong.nonzero()[0].tolist()}"

    def check_biased(self, plan: list[int]) -> Tensor:
        """Under `biased_pair`."""
        bias, bias2 = self.random(self.shape[1]), self.random(self.shape[1])
        name = typed(biased_pair.traced, (False,) * 3).name
        found = self.run(name, [bias, bias2], plan)
        z, gate = self.products[0] + bias.double(), self.products[1] + bias2.double()
        silu = z * torch.sigmoid(z)
        by_sums = SUMS * (1.1 * gate.abs() * self.magnitudes[0] + silu.abs() * self.magnitudes[1])
        self.check(found, silu * gate, by_sums)
        return found


@types
@tiles
@pytest.mark.parametrize("halves", [False, True], ids=["two weights", "halves of one"])
def test_every_tile(tile: int, dtype: torch.dtype, halves: bool) -> None:
    """Ragged tiles, a lone row, one stage of K and less, and more tiles than multiprocessors."""
    for sizes in (
        (129, 264, 136),
        (1, 8, 8),
        (200, 96, 64),
        (384, 512, 2000),
        (3333, 1032, 264),
        (1000, 3000, 72),
    ):
        for raster, swizzle in ((0, 8), (1, 1)):
            Pair(sizes, dtype, halves=halves).check_biased(plans.numbers(plans.TMA, tile, raster, swizzle))


@types
@tiles
@pytest.mark.parametrize("gap", [0, 8, 1], ids=["by TMA", "rows with gaps", "rows that TMA refuses"])
def test_a_matrix_beside_the_second_product(tile: int, dtype: torch.dtype, gap: int) -> None:
    """TMA brings it, as it does an epilogue's only matrix, or threads read it."""
    m, n, k = 333, 424, 200
    pair = Pair((m, n, k), dtype)
    a, b, r = pair.random(n), pair.random(n), pair.random(m, 1)
    residual = pair.random(m, n + gap)[:, :n]
    name = typed(full_pair.traced, (False,) * 5 + (True,)).name
    found = pair.run(name, [a, b, r, residual], plans.numbers(plans.TMA, tile), (0.75,))
    first, second = pair.products
    relu, gate = torch.relu(first + a.double()), second * r.double() + b.double()
    expected = relu * gate + 0.75 * residual.double()
    by_sums = SUMS * (gate.abs() * pair.magnitudes[0] + relu * r.double().abs() * pair.magnitudes[1])
    # The sum of two numbers of opposite signs is small; the roundings of both are not.
    pair.check(found, expected, by_sums + EPSILON[dtype] * relu * gate.abs())


@tiles
def test_the_same_as_two_kernels(tile: int) -> None:
    """The second product rounded to a matrix, and a fused kernel that reads it: as far apart as that rounding."""
    pair = Pair((700, 520, 512), torch.bfloat16)
    name = typed(FUNCTIONS["gated_relu"], (False, False)).name
    found = pair.run(name, [], plans.numbers(plans.TMA, tile))
    gate = torch.mm(pair.x, pair.weights[1].t())
    two = poisoned(pair.shape, torch.bfloat16, DEVICE)
    first = plans.numbers(plans.TMA)
    products.forced_into(two, name, pair.x, pair.weights[0], "ieee", operands=[gate], plan=first)
    by_sums = pair.products[0].abs() * pair.magnitudes[1] + pair.magnitudes[0] * pair.products[1].abs()
    bound = 3 * EPSILON[torch.bfloat16] * two.double().abs() + SUMS * by_sums
    assert bool(((found.double() - two.double()).abs() <= bound).all())


@tiles
def test_again_and_again(tile: int) -> None:
    """The same bits at each of many launches in a row, whatever other kernels left behind."""
    pair = Pair((2049, 1544, 1000), torch.bfloat16)
    plan = plans.numbers(plans.TMA, tile)
    name = typed(FUNCTIONS["gated_silu"], (False, False)).name
    first = pair.run(name, [], plan)
    for _ in range(50):
        assert torch.equal(pair.run(name, [], plan), first)
