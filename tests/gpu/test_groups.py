"""The kernels of rows in groups: every tile and type, against float64, at routings of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.arguments import forms
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import FUNCTIONS, gelu_epilogue
from tests.gpu.launching import DEVICE, Frame, cuda, gated, in_float64, random
from tests.support import plans
from tests.support.reference import Bounded, assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

BF16, FP16 = torch.bfloat16, torch.float16
SUMS = 2.0**-14
"""Of the magnitudes of a sum: tensor cores truncate each of its additions to fp32, K up to 2,100 here."""
FORMS = 2.0**-10.9
"""Of a result in 16 bits: the error of the short forms of its functions (epilogue/primitives/short.h)."""
ROUTINGS: dict[str, tuple[int, ...]] = {
    "one group": (300,),
    "one row each": (1,) * 40,
    "empty ones between": (0, 130, 0, 0, 1, 257, 0),
    "more than a warp looks at": (*(0,) * 33, 5, *(7,) * 40, *(0,) * 60, 200),
    "one with all": (0, 1000, 0),
    "all empty": (0, 0),
    "many tiles": (700, 64, 1300, 2000, 128, 129, 3000),
}


class Kernel(NamedTuple):
    """A tile, of products or of pairs of them, and the weights' order."""

    dtype: torch.dtype
    is_pair: bool
    tile: int
    is_transposed: bool = False

    def __str__(self) -> str:
        dtype, what = str(self.dtype).removeprefix("torch."), "pair" if self.is_pair else "product"
        return f"{dtype}-{what}-{self.tile}{'-transposed' * self.is_transposed}"


def every_kernel() -> tuple[Kernel, ...]:
    """As csrc/gemm/sm90_tma/tiles.h has them."""
    return tuple(
        Kernel(dtype, is_pair, tile, is_transposed)
        for dtype in (BF16, FP16)
        for is_pair, name in ((False, "groups"), (True, "grouped_pairs"))
        for tile in range(plans.tile_count(plans.TMA, name))
        for is_transposed in (False, True)
    )


@epigemm.epilogue
def full(acc: Tensor, a: PerColumn, b: PerColumn, r: PerRow, m: Matrix, s: Scalar) -> Tensor:
    result: Tensor = torch.tanh(acc + a) * r + b * s + m
    return result


class Experts:
    """Rows of x in groups, some behind the last one, and the products in float64.

    Between two transposed weights there are rows of NaN, which no kernel may multiply, even by zeros.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        n: int,
        k: int,
        dtype: torch.dtype,
        behind: int = 5,
        *,
        is_transposed: bool = False,
    ) -> None:
        self.rows, self.n = sum(sizes), n
        self.ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
        self.group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(DEVICE)
        self.x = random(self.rows + behind, k, dtype=dtype)
        self.both = random(len(sizes), 2 * n, k, dtype=dtype)
        if is_transposed:
            columns = torch.full((len(sizes), k + 8, 2 * n), math.nan, dtype=dtype, device=DEVICE)
            self.both = columns[:, :k].copy_(self.both.mT).mT
        self.weights = self.both.chunk(2, 1)  # with rows of the other one between two groups'

    def product(self, which: int) -> tuple[Tensor, Tensor]:
        """Of one weight, and the error of its sums."""
        x, weight = self.x[: self.rows].double(), self.weights[which].double()
        pairs = [(x[self.group == g], each.t()) for g, each in enumerate(weight)]
        exact, magnitudes = [a @ b for a, b in pairs], [a.abs() @ b.abs() for a, b in pairs]
        return torch.cat(exact), SUMS * torch.cat(magnitudes)

    def with_gelu(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """What is behind the first product, and the error of the sums in it."""
        z, error = self.product(0)
        return gelu(z + bias.double()[self.group]), 1.13 * error

    def with_gate(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same of both products."""
        (z, error), (gate, of_gate) = self.product(0), self.product(1)
        z = z if bias is None else z + bias.double()[self.group]
        return gated(silu, (z, gate), (error, of_gate))

    def call(self, function: Any, operands: tuple[Any, ...], *, is_pair: bool = False) -> LinearCall:
        """On tensors as callers give them."""
        epilogue, given = forms.seen(function, self.x, operands)
        second = self.weights[1] if is_pair else None
        return LinearCall(
            epilogue, self.x, self.weights[0], given, strict=True, weight2=second, group_ends=self.ends
        )

    def run(self, call: LinearCall, plan: Sequence[int] | None = None) -> Tensor:
        """Written into a poisoned matrix within a larger one, of which nothing else may change."""
        frame = Frame(len(self.x), self.n, self.x.dtype, written=self.rows)
        resolve.linear(call._replace(out=frame.inner), plan)
        return frame.taken()


def assert_close(found: Tensor, expected: Tensor, by_sums: Tensor) -> None:
    unit = torch.finfo(found.dtype).eps / 2 * 1.01 + FORMS
    assert_within(found, Bounded(expected, unit * expected.abs() + by_sums + 2.0**-24))


class TestEveryKernel:
    kernels = every_kernel()

    @pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
    def test_values(self, kernel: Kernel, routing: tuple[int, ...]) -> None:
        """At ragged N and K, in both orders; two runs give the same bits."""
        for (n, k), order in (((200, 264), (0, 8)), ((1032, 72), (1, 1)), ((8, 2048), (0, 2))):
            experts = Experts(routing, n, k, kernel.dtype, is_transposed=kernel.is_transposed)
            bias = random(len(routing), n, dtype=kernel.dtype)
            if kernel.is_pair:
                call = experts.call(FUNCTIONS["gated_silu"], (bias, None), is_pair=True)
            else:
                call = experts.call(gelu_epilogue("none"), (bias,))
            plan = (0, *plans.numbers(plans.TMA, kernel.tile, *order))
            found = experts.run(call, plan)
            assert_close(found, *(experts.with_gate(bias) if kernel.is_pair else experts.with_gelu(bias)))
            assert torch.equal(experts.run(call, plan), found)

    def test_every_operand(self, kernel: Kernel) -> None:
        """Two vectors a group, a number a row, a matrix by TMA and by threads."""
        if kernel.is_pair:
            pytest.skip("gpu: pairs read the same operands by the same code")
        for gap in (0, 1):
            experts = Experts((130, 0, 3, 257), 264, 200, kernel.dtype, is_transposed=kernel.is_transposed)
            rows, n = experts.x.shape[0], experts.n
            a, b = (random(4, n, dtype=kernel.dtype) for _ in range(2))
            r, m = random(rows, dtype=kernel.dtype), random(rows, n + gap, dtype=kernel.dtype)[:, :n]
            found = experts.run(
                experts.call(full.traced, (a, b, r, m, 0.75)),
                (0, *plans.numbers(plans.TMA, kernel.tile, 0, 8)),
            )
            (z, error), group, of_rows = experts.product(0), experts.group, slice(experts.rows)
            of_row = r[of_rows, None].double()
            expected = in_float64(full, z, a[group], b[group], of_row, m[of_rows], scalars=(0.75,))
            assert_close(found, expected, (error + FORMS) * of_row.abs())

    def test_batches(self, kernel: Kernel) -> None:
        """Groups of one size, which have no ends: a matrix of x for each."""
        for (count, rows), (n, k) in (((3, 200), (200, 264)), ((40, 1), (1032, 72)), ((7, 128), (128, 64))):
            sizes = (rows,) * count
            experts = Experts(sizes, n, k, kernel.dtype, behind=0, is_transposed=kernel.is_transposed)
            bias = random(count, n, dtype=kernel.dtype)
            of_pair: tuple[Any, tuple[Any, ...]] = (FUNCTIONS["gated_silu"], (bias, None))
            function, given = of_pair if kernel.is_pair else (gelu_epilogue("none"), (bias,))
            call = experts.call(function, given, is_pair=kernel.is_pair)
            frame = Frame(count * rows, n, kernel.dtype)
            x, out = (each.view(count, rows, -1) for each in (experts.x, frame.inner))
            call = call._replace(x=x, group_ends=None, out=out)
            resolve.linear(call, (0, *plans.numbers(plans.TMA, kernel.tile, 0, 8)))
            assert_close(
                frame.taken(), *(experts.with_gate(bias) if kernel.is_pair else experts.with_gelu(bias))
            )


@pytest.mark.parametrize(
    "ends", [(5, 3, 100), (-7, 40, 1 << 30), (400, 400, 400), (0, -1, -(1 << 31))], ids=str
)
def test_ends_that_are_wrong_lead_nowhere(ends: tuple[int, ...]) -> None:
    """They count as the end before them, or as the end of x."""
    experts = Experts((50, 50, 50), 136, 64, BF16, behind=0)
    experts.ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    clamped = torch.tensor(ends).clamp(0, 150).cummax(0).values
    experts.rows = int(clamped[-1])
    experts.group = torch.repeat_interleave(
        torch.arange(3), clamped.diff(prepend=torch.zeros(1, dtype=torch.int64))
    ).to(DEVICE)
    bias = random(3, 136, dtype=BF16)
    assert_close(experts.run(experts.call(gelu_epilogue("none"), (bias,))), *experts.with_gelu(bias))


def test_random_routings(rng: torch.Generator) -> None:
    """Whatever the planner chooses."""

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=rng))

    for _ in range(40):
        sizes = [number(1 + number(600)) for _ in range(1 + number(70))]
        n, k, dtype = 8 * (1 + number(150)), 8 * (1 + number(150)), (BF16, FP16)[number(2)]
        experts = Experts(sizes, n, k, dtype, 1 + number(9), is_transposed=bool(number(2)))
        bias = random(len(sizes), experts.n, dtype=experts.x.dtype)
        found = epigemm.grouped_linear(
            experts.x, experts.weights[0], bias, offs=experts.ends, epilogue="gelu", strict=True
        )[: experts.rows]
        assert_close(found, *experts.with_gelu(bias))
        found = epigemm.grouped_linear_glu(experts.x, experts.both, offs=experts.ends)[: experts.rows]
        assert_close(found, *experts.with_gate())


def test_random_batches(rng: torch.Generator) -> None:
    """Public calls, with every operand: PyTorch's batched product in float64."""

    def number(most: int) -> int:
        return 1 + int(torch.randint(0, most, (), generator=rng))

    for _ in range(30):
        count, m, n, k = number(40), number(number(600)), 8 * number(100), 8 * number(100)
        dtype = (BF16, FP16)[number(2) - 1]
        x, weight = random(count, m, k, dtype=dtype), random(count, n, k, dtype=dtype)
        if number(2) == 1:
            weight = weight.mT.contiguous().mT
        a, b = (random(count, n, dtype=dtype) for _ in range(2))
        r, matrix = random(count, m, dtype=dtype), random(count, m, n, dtype=dtype)
        found = full(x, weight, a, b, r, matrix, 0.5)  # by whatever is expected to be the fastest
        wide = x.double(), weight.double().mT
        sums = SUMS * (wide[0].abs() @ wide[1].abs())
        of_row = r[..., None].double()
        given = (a[:, None], b[:, None], of_row, matrix)
        expected = in_float64(full, wide[0] @ wide[1], *given, scalars=(0.5,))
        assert_close(found, expected, (sums + FORMS) * of_row.abs())


def test_captured() -> None:
    """A replay sees other ends, and the host waits for none."""
    experts = Experts((100, 200, 28), 256, 128, BF16, behind=0)
    function = epigemm.grouped_linear
    function(experts.x, experts.weights[0], offs=experts.ends, strict=True)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = function(experts.x, experts.weights[0], offs=experts.ends)
    experts.ends.copy_(torch.tensor((7, 300, 328), dtype=torch.int32))
    graph.replay()
    assert torch.equal(captured, function(experts.x, experts.weights[0], offs=experts.ends))
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(experts.x, experts.weights[0], offs=experts.ends)
        epigemm.grouped_linear_glu(experts.x, experts.both, offs=experts.ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_fallback_and_gradients() -> None:
    """PyTorch's grouped product, and its derivatives; rows behind the last group have none."""
    experts = Experts((100, 0, 60), 128, 64, BF16)
    bias = random(3, 128, dtype=BF16)
    tensors = [each.detach().clone().requires_grad_() for each in (experts.x, experts.weights[0], bias)]
    result = epigemm.grouped_linear(*tensors, offs=experts.ends, epilogue="gelu")[: experts.rows]
    torch.autograd.backward(result.float().sum())
    expected, _ = experts.with_gelu(bias)
    assert float((result.double() - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in tensors)
    assert tensors[0].grad is not None and not bool(tensors[0].grad[experts.rows :].any())
