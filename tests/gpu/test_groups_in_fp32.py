"""The kernels of rows in groups in fp32, which read the weights as they lie, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import bounds
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import BIAS_RELU
from tests.gpu.launching import DEVICE, Frame, captured, cuda, in_float64, random
from tests.gpu.test_groups import ROUTINGS, Experts, full
from tests.support import plans
from tests.support.reference import Bounded, assert_within
from tests.support.watching import poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

FP32 = torch.float32
NUMBERS = {"split": 2, "scaled": 3}  # of `Arithmetic` (csrc/gemm/problem.h)
PRECISIONS = {"split": "highest", "scaled": "high"}
BOUNDS = {"split": bounds.split, "scaled": bounds.scaled}
TILES = {"split": (0, 1, 3), "scaled": (1, 2, 3)}
"""Among those that read the weight as it lies: csrc/gemm/sm90_fp16x3/tiles.h."""
EPILOGUE = 2.0**-20
"""Of a result: the rounding of what is behind a sum in fp32."""


class Kernel(NamedTuple):
    arithmetic: str
    tile: int
    is_transposed: bool

    def __str__(self) -> str:
        return f"{self.arithmetic}-{self.tile}{'-transposed' * self.is_transposed}"

    def plan(self, raster: int = 0, swizzle: int = 8) -> tuple[int, ...]:
        tile = plans.tile_count(plans.FP16X3, self.arithmetic) + self.tile
        return (NUMBERS[self.arithmetic], *plans.numbers(plans.FP16X3, tile, raster, swizzle))


KERNELS = [
    Kernel(arithmetic, tile, is_transposed)
    for arithmetic, tiles in TILES.items()
    for tile in tiles
    for is_transposed in (False, True)
]
every_arithmetic = pytest.mark.parametrize("arithmetic", list(NUMBERS))


class Wide(Experts):
    """In fp32: with the error of sums on slices."""

    def __init__(
        self, sizes: Sequence[int], n: int, k: int, arithmetic: str, behind: int = 5, **more: Any
    ) -> None:
        super().__init__(sizes, n, k, FP32, behind, **more)
        self.arithmetic = arithmetic

    @property
    def weight(self) -> Tensor:
        return self.weights[0]

    def expected(self, bias: Tensor | None = None) -> Bounded:
        """Behind a ReLU."""
        z, error = self.sums()
        z = z if bias is None else z + bias.double()[self.group]
        return Bounded(z.relu(), error + EPILOGUE * z.abs() + 2.0**-140)

    def sums(self) -> tuple[Tensor, Tensor]:
        x, weight = self.x[: self.rows].double(), self.weight.double()
        pairs = [(x[self.group == g], each.t()) for g, each in enumerate(weight)]
        exact, magnitudes = [a @ b for a, b in pairs], [a.abs() @ b.abs() for a, b in pairs]
        return torch.cat(exact), BOUNDS[self.arithmetic](self.x.shape[1]) * torch.cat(magnitudes)

    def wanted(self, bias: Tensor | None = None) -> LinearCall:
        call = self.call(BIAS_RELU, (bias,))
        return call._replace(precision=PRECISIONS[self.arithmetic])

    def checked(self, plan: Sequence[int] | None = None, bias: Tensor | None = None) -> Tensor:
        """With NaN in the workspace, and around the result."""
        with poisoned_memory():
            found = self.run(self.wanted(bias), plan)
        assert_within(found, self.expected(bias))
        return found


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which a NaN equals itself."""
    return tensor.view(torch.int32)


class TestEveryKernel:
    kernels = KERNELS

    @pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
    def test_values(self, kernel: Kernel, routing: tuple[int, ...]) -> None:
        """At ragged N and K, in both orders; two runs give the same bits."""
        sizes = (((200, 264), (0, 8)), ((1028, 76), (1, 1)), ((4, 2048), (0, 2)), ((516, 4160), (0, 8)))
        for (n, k), order in sizes:
            experts = Wide(routing, n, k, kernel.arithmetic, is_transposed=kernel.is_transposed)
            bias, plan = random(len(routing), n, dtype=FP32), kernel.plan(*order)
            found = experts.checked(plan, bias)
            assert torch.equal(experts.checked(plan, bias), found)

    def test_every_operand(self, kernel: Kernel) -> None:
        """Two vectors a group, a number a row, a matrix by TMA and by threads."""
        for gap in (0, 1):
            experts = Wide((130, 0, 3, 257), 264, 200, kernel.arithmetic, is_transposed=kernel.is_transposed)
            rows, n = experts.x.shape[0], experts.n
            a, b = (random(4, n, dtype=FP32) for _ in range(2))
            r, m = random(rows, dtype=FP32), random(rows, n + gap, dtype=FP32)[:, :n]
            call = experts.call(full.traced, (a, b, r, m, 0.75))
            found = experts.run(call._replace(precision=PRECISIONS[kernel.arithmetic]), kernel.plan())
            (z, error), group, of_rows = experts.sums(), experts.group, slice(experts.rows)
            of_row = r[of_rows, None].double()
            expected = in_float64(full, z, a[group], b[group], of_row, m[of_rows], scalars=(0.75,))
            size = 4 + a.abs().max() + b.abs().max() + m.abs().max() + r.abs().max()
            assert_within(found, Bounded(expected, error * of_row.abs() + EPILOGUE * size.double()))

    def test_batches(self, kernel: Kernel) -> None:
        """Groups of one size, which have no ends: a matrix of x for each."""
        for (count, rows), (n, k) in (((3, 200), (200, 264)), ((40, 1), (1032, 72)), ((7, 128), (128, 64))):
            experts = Wide(
                (rows,) * count, n, k, kernel.arithmetic, behind=0, is_transposed=kernel.is_transposed
            )
            frame = Frame(count * rows, n, FP32)
            x, out = (each.view(count, rows, -1) for each in (experts.x, frame.inner))
            call = experts.wanted()._replace(x=x, group_ends=None, out=out)
            resolve.linear(call, kernel.plan())
            assert_within(frame.taken(), experts.expected())

    def test_weights_may_be_written_at_any_time(self, kernel: Kernel) -> None:
        """Between calls and replays of a graph, whose ends change, too, whatever is remembered of the weights."""
        experts = Wide(
            (40, 0, 129, 70), 200, 264, kernel.arithmetic, behind=0, is_transposed=kernel.is_transposed
        )
        out, spare = torch.zeros(239, 200, device=DEVICE), experts.weight.clone()
        call = experts.wanted()._replace(out=out)
        graph = captured(lambda: resolve.linear(call, kernel.plan()))
        for number, factor in enumerate((1.0, 2.0**20, 2.0**-60, 2.0**90, 0.0, 1.0)):
            sizes = ((40, 0, 129, 70), (0, 239, 0, 0), (1, 2, 3, 233), (60, 60, 60, 59))[number % 4]
            route(experts, sizes)
            experts.weight.copy_(spare * factor)
            experts.weight[:, ::3] *= 2.0**-9
            graph.replay()
            assert_within(out, experts.expected())
            assert torch.equal(experts.run(experts.wanted(), kernel.plan()), out)

    def test_what_slices_cannot_hold(self, kernel: Kernel) -> None:
        """Subnormal and huge rows, numbers that are not finite: in each of them a group's own weight counts."""
        sizes = (130, 0, 3, 257, 64)
        experts = Wide(sizes, 200, 264, kernel.arithmetic, is_transposed=kernel.is_transposed)
        experts.x[5] *= 2.0**-140
        experts.x[131] *= 2.0**100
        experts.x[140, ::2] *= 2.0**-40
        experts.weight[3, :, 3] *= 2.0**60
        experts.weight[4, 7] *= 2.0**-130
        experts.checked(kernel.plan())
        exact = experts.sums()[0].relu()
        experts.x[200, 7], experts.x[400, 1] = math.inf, math.nan
        experts.weight[4, 33, 100] = -math.inf
        found = experts.run(experts.wanted(), kernel.plan())
        assert torch.equal(found.isfinite(), experts.sums()[0].relu().isfinite())
        is_whole = torch.ones_like(found, dtype=torch.bool)
        is_whole[200], is_whole[400], is_whole[experts.group == 4, 33] = False, False, False
        close = Bounded(exact[is_whole], experts.expected().tolerance[is_whole])
        assert_within(found[is_whole], close)


def route(experts: Wide, sizes: Sequence[int]) -> None:
    """Other ends, in the same memory."""
    experts.ends.copy_(torch.tensor(sizes).cumsum(0))
    experts.group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(DEVICE)
    experts.rows = sum(sizes)


@every_arithmetic
@pytest.mark.parametrize("place", [0, 2, 3])
def test_experts_without_rows_do_not_count(arithmetic: str, place: int) -> None:
    """Whatever their weights hold, and the rows of x behind all groups."""
    sizes = [300, 100, 40, 257]
    sizes[place] = 0
    experts = Wide(sizes, 200, 264, arithmetic)
    found = experts.checked()
    for value in (math.nan, math.inf, 0.0):
        experts.weight[place] = value
        experts.x[experts.rows :] = value
        with poisoned_memory():
            assert torch.equal(experts.run(experts.wanted()), found)


@every_arithmetic
@pytest.mark.parametrize(
    "ends", [(5, 3, 100), (-7, 40, 1 << 30), (400, 400, 400), (0, -1, -(1 << 31))], ids=str
)
def test_ends_that_are_wrong_lead_nowhere(arithmetic: str, ends: tuple[int, ...]) -> None:
    experts = Wide((50, 50, 50), 136, 264, arithmetic, behind=0)
    clamped = torch.tensor(ends).clamp(0, 150).cummax(0).values
    route(experts, clamped.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist())
    experts.ends.copy_(torch.tensor(ends, dtype=torch.int32))
    experts.x[3, 5] = 2.0**-120  # for the fixup to look at tiles, too
    experts.x[3, 6] = 2.0**60
    experts.checked()


@every_arithmetic
def test_a_result_of_ragged_rows_keeps_what_is_behind(arithmetic: str) -> None:
    """N = 203 numbers are no whole 16 bytes: the result is copied from padded rows."""
    experts = Wide((50, 0, 90), 203, 264, arithmetic)
    out = torch.full((145, 203), 7.0, device=DEVICE)
    resolve.linear(experts.wanted()._replace(out=out))
    assert_within(out[:140], experts.expected())
    assert bool((out[140:] == 7.0).all())


@every_arithmetic
def test_random_routings(arithmetic: str, rng: torch.Generator) -> None:
    """Whatever the planner chooses."""

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=rng))

    for _ in range(40):
        sizes = [number(1 + number(600)) for _ in range(1 + number(70))]
        sizes[0] += 16
        n, k = 4 * (1 + number(300)), 128 + 4 * number(300)
        Wide(sizes, n, k, arithmetic, 1 + number(9), is_transposed=bool(number(2))).checked()


def test_nothing_waits_for_the_host() -> None:
    """Public functions, and what a graph of them gives with other ends."""
    experts = Wide((100, 200, 28), 256, 128, "split", behind=0)
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: epigemm.grouped_linear(experts.x, experts.weight, offs=experts.ends, strict=True),
        lambda: epigemm.grouped_linear_glu(experts.x, experts.both, offs=experts.ends),
    )
    for call in calls:
        call()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            result = call()
        route(experts, (7, 293, 28))
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(bits(again), bits(result))
        route(experts, (100, 200, 28))


def test_gradients() -> None:
    """By the kernels, too, but for those of the weights; rows behind the groups have none."""
    experts = Wide((100, 0, 60, 33), 256, 136, "split")
    bias, upstream = random(4, 256, dtype=FP32), random(len(experts.x), 256, dtype=FP32)
    for is_transposed in (False, True):
        weight = experts.weight.mT.contiguous().mT if is_transposed else experts.weight
        tensors = [each.detach().clone().requires_grad_() for each in (experts.x, weight, bias)]
        wide = [each.detach().double().requires_grad_() for each in tensors]
        result = epigemm.grouped_linear(*tensors, offs=experts.ends, epilogue="tanh")[: experts.rows]
        rows = [wide[0][: experts.rows][experts.group == g] @ each.t() for g, each in enumerate(wide[1])]
        exact = torch.tanh(torch.cat(rows) + wide[2][experts.group])
        found = torch.autograd.grad(result, tensors, upstream[: experts.rows])
        expected = torch.autograd.grad(exact, wide, upstream[: experts.rows].double())
        for one, other in zip((result, *found), (exact, *expected), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert not bool(found[0][experts.rows :].any())
