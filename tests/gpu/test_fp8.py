"""The kernels of 8-bit numbers: every tile, type and accumulation, against float64 of the dequantised inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.arguments import forms
from epigemm.arguments.calls import BLOCKS, EightBits, LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.formulas import BIAS2
from epigemm.epilogues.library import FUNCTIONS, gelu_epilogue
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, Frame, Sizes, gated, in_float64
from tests.ops.eight_bits import LARGEST, same
from tests.support import plans
from tests.support.reference import Bounded, assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SUMS = 2.0**-11
"""Of the magnitudes of a sum: the tensor cores truncate each addition to 13 bits of the largest summand."""
SHORT_FORMS = {BF16: 2.0**-11.3, FP16: 2.0**-17}
"""Of a result: GELU has a shorter form for bf16, and one for fp16 (short_bfloat16.h, short.h)."""
RAGGED: list[Sizes] = [
    # M, N, K: one row, ragged tiles, one stage of K and less, more tiles than multiprocessors
    *((1, 8, 16), (63, 200, 64), (129, 264, 144), (1000, 200, 272), (3333, 1032, 272), (65, 264, 1040)),
    *((2048, 1536, 512), (300, 520, 4096)),
]
WHOLE: list[Sizes] = [(1, 16, 16), (63, 208, 64), (129, 272, 144), (3333, 1040, 272), (2048, 1536, 512)]
"""Rows of results in 8 bits are whole 16 bytes."""
FEW: list[Sizes] = [(1, 128, 128), (7, 272, 528), (33, 1040, 1040), (16, 4096, 4096)]
"""Few rows; short blocks of K, and of N."""
LONG: list[Sizes] = [(1, 128, 1040), (63, 208, 1152), (129, 272, 4096), (200, 4096, 1936), (390, 1040, 8208)]
"""With stages of K for eight CTAs, as many for each or not; whole and ragged tiles, more than run at once."""


class Kernel(NamedTuple):
    """A tile, what it multiplies, and what it gives: e4m3 has a `scale`, which may be `BLOCKS`.

    `is_in_blocks`: blocks of x and of the weight have scales. `splits`: how many CTAs share the K of a tile.
    """

    x: torch.dtype = E4M3
    weight: torch.dtype = E4M3
    result: torch.dtype = BF16
    accumulate: str = "promoted"
    tile: int = 0
    scale: float | str | None = None
    is_pair: bool = False
    is_in_blocks: bool = False
    splits: int = 1

    def __str__(self) -> str:
        types = "-".join(str(each).removeprefix("torch.") for each in self[:3])
        scale = "" if self.scale is None else f"-{self.scale}"
        of_blocks, of_k = "-blocks" * self.is_in_blocks, f"-{self.splits}" * (self.splits > 1)
        return f"{types}{scale}-{self.accumulate}-{self.tile}{'-pair' * self.is_pair}{of_blocks}{of_k}"

    @property
    def of_operands(self) -> torch.dtype:
        """The type of the operands that have the result's, beside e4m3 bf16."""
        return BF16 if self.result is E4M3 else self.result

    def plan(self, raster: int = 0, swizzle: int = 8) -> tuple[int, ...]:
        """As `resolve.linear` takes it."""
        arithmetic = dry_runs.ARITHMETICS.index(self.accumulate)
        return (arithmetic, *plans.numbers(plans.TMA, self.tile, raster, swizzle, self.splits))


def products() -> list[Kernel]:
    """As csrc/gemm/sm90_tma/tiles.h has them."""
    factors = [(E5M2, E4M3, BF16), (E4M3, E5M2, BF16), *((E4M3, E4M3, each) for each in (BF16, FP16, FP32))]
    return [
        Kernel(*types, accumulate, tile)
        for types in factors
        for accumulate in ("promoted", "fast")
        for tile in range(
            1 if E5M2 in types else plans.tile_count(plans.TMA, accumulate) if types[2] is BF16 else 3
        )
    ]


def with_scales(*, is_pair: bool) -> list[Kernel]:
    """Those whose results are in 8 bits."""
    return [
        Kernel(E4M3, E4M3, E4M3, accumulate, tile, scale, is_pair)
        for accumulate in ("fast", "promoted")
        for scale, of_scale in ((0.02, "_to_e4m3"), (BLOCKS, "_to_blocks"))
        for tile in range(plans.tile_count(plans.TMA, accumulate + "_pairs" * is_pair + of_scale))
    ]


PRODUCTS, QUANTISED = products(), with_scales(is_pair=False)
PAIRS = [
    Kernel(E4M3, E4M3, result, accumulate, tile, None, is_pair=True)
    for accumulate, result in itertools.product(("fast", "promoted"), (BF16, FP16, FP32))
    for tile in range(plans.tile_count(plans.TMA, f"{accumulate}_pairs") if result is BF16 else 1)
] + with_scales(is_pair=True)


IN_BLOCKS = [
    Kernel(E4M3, E4M3, result, "promoted", tile, scale, is_pair, is_in_blocks=True)
    for is_pair in (False, True)
    for result, scale, to in (
        *((each, None, "") for each in (BF16, FP16, FP32)),
        *((E4M3, 0.02, "_to_e4m3"), (E4M3, BLOCKS, "_to_blocks")),
    )
    if not (is_pair and scale == BLOCKS)
    for tile in range(
        min(plans.tile_count(plans.TMA, "blocks" + "_pairs" * is_pair + to), 9 if result is BF16 else 3)
    )
]


ALONE = {"fast": (1, 2, 6, 7, 8, 9, 10), "promoted": (1, 2, 5, 6, 7, 8), "blocks": (1, 2, 4)}
"""Tiles without a cluster and without turns, which CTAs may share: of all, and of results in blocks the second."""
SHARED = [
    each._replace(splits=splits)
    for each in (*PRODUCTS, *QUANTISED, *IN_BLOCKS)
    if not each.is_pair
    and each.tile
    in ((1,) if each.scale == BLOCKS else ALONE["blocks" if each.is_in_blocks else each.accumulate])
    for splits in (2, 4, 8)
]


@epigemm.epilogue
def full(acc: Tensor, bias: PerColumn, row: PerRow, a: Matrix, b: Matrix, s: Scalar) -> Tensor:
    result: Tensor = torch.tanh(acc + bias) * row + torch.sigmoid(a) * s + b
    return result


def parts(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A result, and the scales of its blocks if it has some."""
    return found if isinstance(found, tuple) else (found,)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


class Behind(NamedTuple):
    """What runs behind a product, its operands, what it gives in float64, and the error of the sums in it."""

    function: Any
    operands: tuple[Any, ...]
    expected: Tensor
    by_sums: Tensor


def in_either_order(m: int, n: int, k: int, count: int, number: int) -> tuple[Tensor, Tensor]:
    """Random scales of blocks of x and of so many weights, in one order or the other."""
    across, down = math.ceil(k / 128), count * math.ceil(n / 128)
    of_x, of_weight = (
        torch.rand(across, m, device=DEVICE) / 8 + 0.01,
        torch.rand(across, down, device=DEVICE) + 0.5,
    )
    return (
        of_x.t().contiguous() if number % 2 else of_x.t(),
        of_weight.t().contiguous() if number % 3 else of_weight.t(),
    )


def wide(scales: Tensor, height: int, rows: int, columns: int) -> Tensor:
    """The scale of each number of a matrix, of those of its blocks of so many rows and 128 columns."""
    return scales.double().repeat_interleave(128, 1)[:, :columns].repeat_interleave(height, 0)[:rows]


class Product:
    """Random factors with scales, their product in float64, or both of a pair, and the magnitudes of the sums."""

    def __init__(self, kernel: Kernel, sizes: Sizes, number: int = 0) -> None:
        m, n, k = sizes
        count = 1 + kernel.is_pair
        self.kernel, self.shape = kernel, (m, n)
        self.x, weight = random(m, k).to(kernel.x), random(count * n, k).to(kernel.weight)
        self.weight, *others = weight.chunk(count)
        self.weight2 = others[0] if others else None
        row, one = torch.rand(m, device=DEVICE) / 8 + 0.01, torch.tensor(0.05, device=DEVICE)
        self.x_scale = row if number % 2 else one
        row, one = torch.rand(count * n, device=DEVICE) + 0.5, torch.tensor(1.5, device=DEVICE)
        self.weight_scale = row if number % 3 else one
        of_x, of_weight = (each.double().reshape(-1, 1) for each in (self.x_scale, self.weight_scale))
        if kernel.is_in_blocks:
            self.x_scale, self.weight_scale = in_either_order(m, n, k, count, number)
            of_x = wide(self.x_scale, 1, m, k)
            of_weight = torch.cat([wide(each, 128, n, k) for each in self.weight_scale.chunk(count)])
        x, weight = self.x.double() * of_x, weight.double() * of_weight
        self.exact = (x @ weight.t()).chunk(count, -1)
        self.magnitudes = (x.abs() @ weight.abs().t()).chunk(count, -1)

    @property
    def keywords(self) -> dict[str, Any]:
        """As the public functions take them."""
        return self.about(self.kernel, self.kernel.scale)._asdict()

    def about(self, kernel: Kernel, scale: Any) -> EightBits:
        return EightBits(self.x_scale, self.weight_scale, kernel.result, kernel.accumulate, scale)

    def call(self, kernel: Kernel, behind: Behind, scale: Any, out: Tensor | None = None) -> LinearCall:
        """`scale`: of the result, as `EightBits` has it in a call. With `out` no fallback is accepted."""
        epilogue, given = forms.seen(behind.function, self.x, behind.operands, kernel.of_operands)
        options: dict[str, Any] = {"uses_pack": False, "strict": out is not None, "out": out}
        options |= {"weight2": self.weight2, "eight_bits": self.about(kernel, scale)}
        return LinearCall(epilogue, self.x, self.weight, given, kernel.accumulate, **options)

    def run(
        self, behind: Behind, kernel: Kernel | None = None, order: tuple[int, int] = (0, 8), scale: Any = None
    ) -> tuple[Tensor, ...]:
        """The kernel's result, and the scales `[M, blocks]` if it is in blocks; nothing is written beside them."""
        kernel, (m, n) = kernel or self.kernel, self.shape
        result, of_blocks = Frame(m, n, kernel.result), Frame(1, -(-n // 128) * m, FP32)
        is_in_blocks = kernel.scale == BLOCKS
        asked = of_blocks.inner[0].view(-1, m) if is_in_blocks else kernel.scale if scale is None else scale
        resolve.linear(self.call(kernel, behind, asked, result.inner), kernel.plan(*order))
        found, scales = result.taken(), of_blocks.taken().view(-1, m).t()
        return (found, scales) if is_in_blocks else (found,)

    def check(self, found: Tensor | tuple[Tensor, ...], expected: Tensor, by_sums: Tensor) -> None:
        """Within `by_sums` and a rounding; before one to e4m3 there is one of bf16 (short forms' or the blocks')."""
        result, *scales = parts(found)
        if self.kernel.scale is None:
            unit = torch.finfo(result.dtype).eps / 2 * 1.01 + SHORT_FORMS.get(result.dtype, 0.0)
            bound = unit * expected.abs() + by_sums
        else:
            scale: Any = self.kernel.scale
            if scales:
                scale = scales[0].double().repeat_interleave(128, -1)[:, : self.shape[1]]
            bound = (expected.abs() * 2.0**-8 + by_sums) / scale
            expected = (expected / scale).clamp(-LARGEST, LARGEST)
            bound = bound + (expected.abs() * 2.0**-4).clamp(min=2.0**-10) * 1.02
        assert_within(result.double(), Bounded(expected, bound))


def epilogue_of(product: Product, number: int) -> Behind:
    """One of three epilogues. None is steeper than 1.13."""
    (m, n), dtype, (z, *_) = product.shape, product.kernel.of_operands, product.exact
    by_sums, bias = product.magnitudes[0] * SUMS * 1.2 + 1e-6, random(n).to(dtype)
    if number % 3 == 0:
        return Behind(gelu_epilogue("none"), (bias,), functional.gelu(z + bias.double()), by_sums)
    other = FP32 if number % 2 else dtype
    matrix = random(m, n).to(other)
    if number % 3 == 1:
        return Behind(FUNCTIONS["residual"], (bias, matrix), z + bias.double() + matrix.double(), by_sums)
    column, row, first = random(n).to(other), random(m).to(dtype), random(m, n).to(dtype)
    expected = in_float64(full, z, column, row[:, None], first, matrix, scalars=(1.5,))
    by_sums = by_sums * row.double().abs()[:, None].clamp(min=1)
    return Behind(full.traced, (column, row, first, matrix, 1.5), expected, by_sums)


def gate_of(pair: Product, number: int) -> Behind:
    """SiLU or GELU, with biases and without."""
    biases = [random(pair.shape[1]).to(pair.kernel.of_operands if number % 3 else FP32) for _ in range(2)]
    activation, has_bias = ("silu", "gelu")[number % 2], number % 4 != 3
    both = [z + bias.double() * has_bias for z, bias in zip(pair.exact, biases, strict=True)]
    errors = [each * SUMS * 1.2 for each in pair.magnitudes]
    expected, by_sums = gated(getattr(functional, activation), both, errors)
    operands = (*biases, None) if has_bias else (None, None)
    rounding = torch.finfo(pair.kernel.of_operands).eps / 2  # once more, for a gate's several short forms
    by_sums = by_sums + rounding * expected.abs() + 1e-5
    return Behind(FUNCTIONS[f"gated_{activation}{BIAS2 * has_bias}"], operands, expected, by_sums)


def behind(product: Product, number: int) -> Behind:
    return (gate_of if product.kernel.is_pair else epilogue_of)(product, number)


class TestEveryKernel:
    kernels = (*PRODUCTS, *QUANTISED, *PAIRS, *IN_BLOCKS)

    def test_values(self, kernel: Kernel) -> None:
        """In both orders, the result's scale by value and on the device; two runs give the same bits."""
        every = WHOLE * (kernel.result is E4M3 or kernel.is_pair) + RAGGED * (not kernel.is_pair)
        for number, sizes in enumerate(every + FEW * kernel.is_in_blocks, kernel.tile):
            product = Product(kernel, sizes, number)
            given = behind(product, number)
            scale = torch.tensor(kernel.scale, device=DEVICE) if number % 2 and kernel.scale == 0.02 else None
            about = (kernel, (number % 2, 1 + 7 * (number % 2)), scale)
            found = product.run(given, *about)
            product.check(found, given.expected, given.by_sums)
            assert same(product.run(given, *about), found)


class TestSharedK:
    kernels = SHARED

    def test_values(self, kernel: Kernel) -> None:
        """As those of one CTA; the leader adds in one order, so a hundred runs give the same bits."""
        for number, sizes in enumerate(LONG, kernel.tile):
            product = Product(kernel, sizes, number)
            given = epilogue_of(product, number)
            found = product.run(given)
            product.check(found, given.expected, given.by_sums)
            assert all(same(product.run(given), found) for _ in range(100 if number == kernel.tile else 3))

    def test_a_stage_each(self, kernel: Kernel) -> None:
        """A stage of K for each CTA."""
        product = Product(kernel, (70, 272, 128 * kernel.splits - 112))
        given = epilogue_of(product, 0)
        product.check(product.run(given), given.expected, given.by_sums)


class TestProducts:
    kernels = (*PRODUCTS, *(each for each in IN_BLOCKS if each.scale is None and not each.is_pair))

    def test_special_scales(self, kernel: Kernel) -> None:
        """Of sums that are exact: their signs, and which of them are 0, decide what an infinity makes of them."""
        product = Product(kernel, (130, 136, 128), 5)
        for each in (product.x, product.weight):
            each.copy_(torch.randint(-1, 2, each.shape, device=DEVICE).float())
        product.x_scale.view(130, 1)[:3] = torch.tensor(((math.inf,), (0.0,), (math.nan,)), device=DEVICE)
        (result,) = product.run(Behind(gelu_epilogue("none"), (None,), *product.exact, *product.magnitudes))
        options = product.keywords | {"x_scale": product.x_scale[:3], "out_dtype": FP32}
        expected = functional.gelu(epigemm.linear(product.x[:3], product.weight, **options))
        assert torch.equal(result[:3].isnan(), expected.isnan())
        assert torch.equal(result[:3].isinf(), expected.isinf())
        assert bool((result[1] == 0).all()) and bool(result[3:].isfinite().all())
