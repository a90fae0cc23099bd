"""The kernels of 8-bit numbers: every tile, type and accumulation, against float64 of the dequantised inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import resolve
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, Kernel, Sizes, captured, checked, launch
from tests.support import plans
from tests.support.arithmetic import Arithmetic
from tests.support.cases import poisoned
from tests.support.problems import Problem, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SUMS = 2.0**-11 * 1.13
"""Of the magnitudes of a sum: the tensor cores truncate each addition to 13 bits of the largest summand."""
RAGGED: list[Sizes] = [
    # M, N, K: one row, ragged tiles, one stage of K and less, more tiles than multiprocessors
    *((1, 8, 16), (63, 200, 64), (129, 264, 144), (1000, 200, 272), (3333, 1032, 272), (65, 264, 1040)),
    *((2048, 1536, 512), (300, 520, 4096)),
]


def of_8_bits(
    accumulate: str, result: torch.dtype = BF16, x: torch.dtype = E4M3, weight: torch.dtype = E4M3
) -> Arithmetic:
    """Its name is that of the types and of the accumulation."""
    types = [str(each).removeprefix("torch.") for each in (x, weight, result)]
    name = "-".join((*types, accumulate))
    return Arithmetic(name, result, accumulate, product_bound=lambda k: SUMS, factors=(x, weight))


def every_kernel() -> tuple[Kernel, ...]:
    """As csrc/gemm/sm90_tma/tiles.h has them."""
    found = []
    for accumulate in ("promoted", "fast"):
        for x, weight, result, tiles in (
            (E4M3, E4M3, BF16, plans.tile_count(plans.TMA, accumulate)),
            *((E4M3, E4M3, FP16, 3), (E4M3, E4M3, FP32, 3), (E5M2, E4M3, BF16, 1), (E4M3, E5M2, BF16, 1)),
        ):
            arithmetic = of_8_bits(accumulate, result, x, weight)
            found += [Kernel(plans.TMA, tile, arithmetic) for tile in range(tiles)]
    return tuple(found)


@epigemm.epilogue
def biased_residual(acc: Tensor, bias: epigemm.PerColumn, residual: epigemm.Matrix) -> Tensor:
    return acc + bias + residual


@epigemm.epilogue
def full(
    acc: Tensor,
    bias: epigemm.PerColumn,
    row: epigemm.PerRow,
    a: epigemm.Matrix,
    b: epigemm.Matrix,
    s: epigemm.Scalar,
) -> Tensor:
    result: Tensor = torch.tanh(acc + bias) * row + torch.sigmoid(a) * s + b
    return result


EPILOGUES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ("bias_gelu", ()),
    (biased_residual, ("residual",)),
    (full, ("bias", "b")),
)
"""And operands that may be fp32."""


class TestEveryKernel:
    kernels = every_kernel()

    def test_values(self, kernel: Kernel, rng: torch.Generator) -> None:
        """At ragged sizes, in both orders, into a part of a larger matrix; two runs give the same bits."""
        for place, sizes in enumerate(RAGGED):
            number = place + kernel.tile
            of_rows, order = (number % 2 == 1, number % 3 > 0), (place % 2, 1 + 7 * (place % 2))
            of, wide = EPILOGUES[number % 3]
            wide = wide if number % 2 else ()
            problem = make(of, kernel.arithmetic, sizes, rng, of_rows=of_rows, wide=wide)
            m, n, _ = sizes
            around = poisoned((m + 2, n + 24), kernel.dtype, DEVICE)
            out = around[1 : m + 1, 8 : n + 8]
            found = checked(problem, kernel, *order, out=out).clone()
            assert torch.equal(launch(problem, kernel, *order, out=out.fill_(math.nan)), found)
            out.fill_(math.nan)
            assert bool(around.isnan().all()), "something was written outside of the result"

    def test_special_scales(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Of sums that are exact, some of them 0."""
        sizes, of_rows = (130, 136, 128), (True, True)
        problem = make(
            "bias_gelu", kernel.arithmetic, sizes, rng, with_bias=False, whole=True, of_rows=of_rows
        )
        scales(problem)["x_scale"][:3] = torch.tensor([math.inf, 0.0, math.nan], device=DEVICE)
        found = checked(problem, kernel)
        assert bool((found[1] == 0).all()) and bool(found[3:].isfinite().all())


def scales(problem: Problem) -> dict[str, Any]:
    """As the public functions take them."""
    assert problem.eight_bits is not None
    return problem.eight_bits._asdict()


def of_gelu(accumulate: str, rng: torch.Generator, sizes: Sizes, result: torch.dtype = BF16) -> Problem:
    """With a scale for each row of x and of the weight."""
    return make("bias_gelu", of_8_bits(accumulate, result), sizes, rng, of_rows=(True, True))


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_random_calls(accumulate: str, rng: torch.Generator) -> None:
    """Whatever the planner chooses; rows that are not whole 16 bytes are padded and copied."""

    def number(most: int) -> int:
        return int(torch.randint(1, most, (), generator=rng))

    for _ in range(20):
        sizes, result = (number(3000), number(1500), 16 * number(100)), (BF16, FP16, FP32)[number(4) - 1]
        arithmetic, of_rows = of_8_bits(accumulate, result), (number(3) == 1, number(3) == 1)
        problem = make("bias_gelu", arithmetic, sizes, rng, of_rows=of_rows)
        given = (problem.x, problem.weight, problem.operands.bias)
        problem.check(epigemm.linear_gelu(*given, **scales(problem), strict=True))


def test_the_fallback(rng: torch.Generator) -> None:
    """`torch._scaled_mm`, and what follows it in a kernel of its own."""
    for result, of_rows in ((BF16, (False, False)), (FP32, (False, False)), (BF16, (True, True))):
        problem = make("bias_gelu", of_8_bits("fast", result), (256, 512, 1024), rng, of_rows=of_rows)
        found, expected = resolve.linear(problem.call(), dry_runs.FALLBACK), problem.expected().expected
        assert float((found.double() - expected).abs().max()) <= 0.01 * float(expected.abs().max())


def test_a_graph_reads_scales_where_they_lie(rng: torch.Generator) -> None:
    problem = of_gelu("promoted", rng, (256, 512, 1024))
    given, out = scales(problem), problem.out()
    graph = captured(lambda: epigemm.linear_gelu(problem.x, problem.weight, out=out, **given))
    given["x_scale"].mul_(2)
    graph.replay()
    assert torch.equal(out, epigemm.linear_gelu(problem.x, problem.weight, **given))


def test_batch_invariance(rng: torch.Generator) -> None:
    problem = of_gelu("fast", rng, (300, 512, 1024))
    given = scales(problem)
    with epigemm.batch_invariant():
        whole = epigemm.linear_gelu(problem.x, problem.weight, **given)
        given["x_scale"] = given["x_scale"][17:18]
        alone = epigemm.linear_gelu(problem.x[17:18], problem.weight, **given)
    assert torch.equal(whole[17:18], alone)
