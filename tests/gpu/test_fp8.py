"""The kernels of 8-bit numbers: every tile, type and accumulation, against float64 of the dequantised inputs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments import forms
from epigemm.arguments.calls import EightBits, LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import FUNCTIONS, gelu_epilogue
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, Sizes, cuda
from tests.support import plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SUMS = 2.0**-11
"""Of the magnitudes of a sum: the tensor cores truncate each addition to 13 bits of the largest summand."""
SHORT_FORMS = {BF16: 2.0**-11.3, FP16: 2.0**-17}
RAGGED: list[Sizes] = [
    # M, N, K: one row, ragged tiles, one stage of K and less, more tiles than multiprocessors
    *((1, 8, 16), (63, 200, 64), (129, 264, 144), (1000, 200, 272), (3333, 1032, 272), (65, 264, 1040)),
    *((2048, 1536, 512), (300, 520, 4096)),
]


class Kernel(NamedTuple):
    """A tile, and what it multiplies."""

    x: torch.dtype
    weight: torch.dtype
    result: torch.dtype
    accumulate: str
    tile: int

    def __str__(self) -> str:
        types = "-".join(str(each).removeprefix("torch.") for each in self[:3])
        return f"{types}-{self.accumulate}-{self.tile}"

    def plan(self, raster: int = 0, swizzle: int = 8) -> tuple[int, ...]:
        """As `resolve.linear` takes it."""
        arithmetic = dry_runs.ARITHMETICS.index(self.accumulate)
        return (arithmetic, *plans.numbers(plans.TMA, self.tile, raster, swizzle))


def every_kernel() -> tuple[Kernel, ...]:
    """As csrc/gemm/sm90_tma/tiles.h has them."""
    factors = (
        (E4M3, E4M3, BF16),
        (E4M3, E4M3, FP16),
        (E4M3, E4M3, FP32),
        (E5M2, E4M3, BF16),
        (E4M3, E5M2, BF16),
    )
    return tuple(
        Kernel(*types, accumulate, tile)
        for types in factors
        for accumulate in ("promoted", "fast")
        for tile in range(
            1 if E5M2 in types else plans.tile_count(plans.TMA, accumulate) if types[2] is BF16 else 3
        )
    )


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


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


class Product:
    """Random factors with scales, their product in float64, and the magnitudes of its sums."""

    def __init__(self, kernel: Kernel, sizes: Sizes, number: int = 0) -> None:
        m, n, k = sizes
        self.kernel, self.shape = kernel, (m, n)
        self.x, self.weight = random(m, k).to(kernel.x), random(n, k).to(kernel.weight)
        x_scale = torch.rand(m, device=DEVICE) / 8 + 0.01 if number % 2 else torch.tensor(0.05, device=DEVICE)
        of_weight = torch.rand(n, device=DEVICE) + 0.5 if number % 3 else torch.tensor(1.5, device=DEVICE)
        self.scales = EightBits(x_scale, of_weight, kernel.result, kernel.accumulate)
        x, weight = self.x.double(), self.weight.double()
        factor = x_scale.double().reshape(-1, 1) * of_weight.double().reshape(1, -1)
        self.exact, self.magnitudes = (x @ weight.t()) * factor, (x.abs() @ weight.abs().t()) * factor

    @property
    def keywords(self) -> dict[str, Any]:
        """As the public functions take them."""
        return self.scales._asdict()

    def run(self, function: Any, operands: tuple[Any, ...], raster: int, swizzle: int) -> Tensor:
        """The kernel's result, in a poisoned matrix that is part of a larger one, which must stay as it is."""
        m, n = self.shape
        epilogue, given = forms.seen(function, self.x, operands, self.kernel.result)
        around = torch.full((m + 2, n + 24), math.nan, dtype=self.kernel.result, device=DEVICE)
        out = around[1 : m + 1, 8 : n + 8]
        about = (self.kernel.accumulate, False, True, False, out)
        call = LinearCall(epilogue, self.x, self.weight, given, *about, eight_bits=self.scales)
        result = resolve.linear(call, self.kernel.plan(raster, swizzle)).clone()
        out.fill_(math.nan)
        assert bool(around.isnan().all()), "something was written outside of the result"
        return result

    def check(self, result: Tensor, expected: Tensor) -> None:
        """Within a rounding of the result and the tensor cores' of the sums; no epilogue here is steeper than 1.13.

        GELU has a shorter form for bf16, and one for fp16: csrc/epilogue/primitives/short_bfloat16.h, short.h.
        """
        rounding, form = torch.finfo(result.dtype).eps / 2, SHORT_FORMS.get(result.dtype, 0.0)
        bound = expected.abs() * (rounding * 1.01 + form) + self.magnitudes * SUMS * 1.13 + 1e-6
        ratio = ((result.reshape(self.shape).double() - expected).abs() / bound).nan_to_num(math.inf)
        assert float(ratio.max()) <= 1, f"{self.kernel}: {float(ratio.max())} of the bound"


def with_operands(product: Product, number: int) -> tuple[Any, tuple[Any, ...], Tensor]:
    """One of three epilogues: what runs, its operands, what it gives."""
    (m, n), dtype = product.shape, product.kernel.result
    z, bias = product.exact, random(n).to(dtype)
    if number % 3 == 0:
        return gelu_epilogue("none"), (bias,), torch.nn.functional.gelu(z + bias.double())
    other = FP32 if number % 2 else dtype
    matrix = random(m, n).to(other)
    if number % 3 == 1:
        return FUNCTIONS["residual"], (bias, matrix), z + bias.double() + matrix.double()
    column, row, first = random(n).to(other), random(m).to(dtype), random(m, n).to(dtype)
    expected = torch.tanh(z + column.double()) * row.double()[:, None]
    expected = expected + torch.sigmoid(first.double()) * 1.5 + matrix.double()
    product.magnitudes = product.magnitudes * row.double().abs()[:, None].clamp(min=1)
    return full.traced, (column, row, first, matrix, 1.5), expected


class TestEveryKernel:
    kernels = every_kernel()

    def test_values(self, kernel: Kernel) -> None:
        """At ragged sizes, in both orders; two runs give the same bits."""
        for number, sizes in enumerate(RAGGED):
            product = Product(kernel, sizes, number + kernel.tile)
            function, operands, expected = with_operands(product, number + kernel.tile)
            order = (number % 2, 1 + 7 * (number % 2))
            result = product.run(function, operands, *order)
            product.check(result, expected)
            assert torch.equal(product.run(function, operands, *order), result)

    def test_special_scales(self, kernel: Kernel) -> None:
        """Of sums that are exact: their signs, and which of them are 0, decide what an infinity makes of them."""
        product = Product(kernel, (130, 136, 128), 5)
        product.x, product.weight = (
            torch.randint(-1, 2, each.shape, device=DEVICE).float().to(each.dtype)
            for each in (product.x, product.weight)
        )
        assert product.scales.x_scale is not None
        for row, value in enumerate((math.inf, 0.0, math.nan)):
            product.scales.x_scale[row] = value
        result = product.run(gelu_epilogue("none"), (None,), 0, 8)
        plain = epigemm.linear(product.x[:3], product.weight, **product.keywords | {
            "x_scale": product.scales.x_scale[:3], "out_dtype": FP32})  # fmt: skip
        expected = torch.nn.functional.gelu(plain)
        assert torch.equal(result[:3].isnan(), expected.isnan())
        assert torch.equal(result[:3].isinf(), expected.isinf())
        assert bool((result[1] == 0).all()) and bool(result[3:].isfinite().all())


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_random_calls(accumulate: str, rng: torch.Generator) -> None:
    """Whatever the planner chooses; rows that are not whole 16 bytes are padded and copied."""

    def number(most: int) -> int:
        return int(torch.randint(1, most, (), generator=rng))

    for _ in range(20):
        kernel = Kernel(E4M3, E4M3, (BF16, FP16, FP32)[number(4) - 1], accumulate, 0)
        product = Product(kernel, (number(3000), number(1500), 16 * number(100)), number(6))
        bias = random(product.shape[1]).to(kernel.result)
        result = epigemm.linear_gelu(product.x, product.weight, bias, **product.keywords, strict=True)
        product.check(result, torch.nn.functional.gelu(product.exact + bias.double()))


def test_the_fallback() -> None:
    """`torch._scaled_mm`, and what follows it in a kernel of its own."""
    for number, result in enumerate((BF16, FP32)):
        product = Product(Kernel(E4M3, E4M3, result, "fast", 0), (256, 512, 1024), number * 6)
        bias = random(512).to(result)
        about = ("fast", False, False, False, None)
        call = LinearCall(
            gelu_epilogue("none"), product.x, product.weight, (bias,), *about, eight_bits=product.scales
        )
        found = resolve.linear(call, dry_runs.FALLBACK)
        expected = torch.nn.functional.gelu(product.exact + bias.double())
        assert float((found.double() - expected).abs().max()) <= 0.01 * float(expected.abs().max())


def test_captured() -> None:
    """Scales are read where they lie: a replay sees other ones."""
    product = Product(Kernel(E4M3, E4M3, BF16, "promoted", 0), (256, 512, 1024), 5)
    scales = product.keywords
    epigemm.linear_gelu(product.x, product.weight, **scales)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = epigemm.linear_gelu(product.x, product.weight, **scales)
    scales["x_scale"].mul_(2)
    graph.replay()
    assert torch.equal(captured, epigemm.linear_gelu(product.x, product.weight, **scales))


def test_batch_invariance() -> None:
    product = Product(Kernel(E4M3, E4M3, BF16, "fast", 0), (300, 512, 1024), 5)
    scales = product.keywords
    with epigemm.batch_invariant():
        whole = epigemm.linear_gelu(product.x, product.weight, **scales)
        alone = epigemm.linear_gelu(
            product.x[17:18], product.weight, **scales | {"x_scale": scales["x_scale"][17:18]}
        )
    assert torch.equal(whole[17:18], alone)
