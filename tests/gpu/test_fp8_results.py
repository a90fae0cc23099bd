"""The kernels of 8-bit numbers with results in 8 bits: against float64 of the dequantised inputs.

Results in blocks are, bit for bit, those of the bf16 kernel, quantised by PyTorch; results with one scale those of the
fp32 kernel, where the epilogue is exact.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments import eight_bits, forms
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import BIAS, gelu_epilogue
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, Sizes, cuda
from tests.gpu.test_fp8 import BF16, E4M3, FP32, RAGGED, SUMS, Kernel, Product, random, with_operands
from tests.ops.test_eight_bit_results import in_blocks, matrix_itself, same, special
from tests.support import plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

BLOCKS, LARGEST = "1x128", 448.0
WHOLE: list[Sizes] = [(1, 16, 16), (63, 208, 64), (129, 272, 144), (3333, 1040, 272), (2048, 1536, 512)]
"""M, N, K, whose rows of results in 8 bits are whole 16 bytes."""


class Quantised(NamedTuple):
    """A tile of a product, and whether its results are in blocks; csrc/gemm/sm90_tma/tiles.h."""

    accumulate: str
    is_in_blocks: bool
    tile: int

    def __str__(self) -> str:
        return f"{'blocks' if self.is_in_blocks else 'e4m3'}-{self.accumulate}-{self.tile}"

    def of(self, result: torch.dtype, tile: int | None = None) -> Kernel:
        """A kernel of another result."""
        return Kernel(E4M3, E4M3, result, self.accumulate, self.tile if tile is None else tile)

    @property
    def like(self) -> Kernel:
        """One that gives what is quantised: it multiplies by the same instructions."""
        if not self.is_in_blocks:
            return self.of(FP32, self.tile if self.tile < 3 else 0)
        return self.of(BF16, 0 if self.accumulate == "fast" else 4)


EVERY = [
    Quantised(accumulate, is_in_blocks, tile)
    for accumulate in ("fast", "promoted")
    for is_in_blocks in (False, True)
    for tile in range(plans.FAMILIES[plans.TMA][f"{accumulate}_to_{'blocks' if is_in_blocks else 'e4m3'}"])
]


def poisoned(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A result in e4m3 whose rows are whole 16 bytes, and what is around it: NaN, all of it."""
    around = torch.full((rows + 2, columns + -columns % 16 + 32), 0x7F, dtype=torch.uint8, device=DEVICE)
    return around.view(E4M3)[1 : rows + 1, 16 : columns + 16], around


def memory_of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Memory for the scales of blocks, and what is around it: NaN, all of it."""
    blocks = -(-columns // 128)
    around = torch.full((blocks * rows + 64,), math.nan, device=DEVICE)
    return around[32 : 32 + blocks * rows].view(blocks, rows), around


def run(
    product: Product, kernel: Quantised, function: Any, operands: tuple[Any, ...], scale: Any, raster: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The kernel's result, and the scales `[M, blocks]` of its blocks; nothing is written beside them."""
    m, n = product.shape
    epilogue, given = forms.seen(function, product.x, operands, BF16)
    out, around = poisoned(m, n)
    memory, around_scales = memory_of(m, n)
    about = product.scales._replace(out_dtype=E4M3, out_scale=memory if kernel.is_in_blocks else scale)
    call = LinearCall(
        epilogue,
        product.x,
        product.weight,
        given,
        kernel.accumulate,
        False,
        True,
        False,
        out,
        eight_bits=about,
    )
    result = resolve.linear(call, kernel.of(E4M3).plan(raster)).clone()
    scales = memory.t().clone()
    out.view(torch.uint8).fill_(0x7F)
    memory.fill_(math.nan)
    assert bool((around == 0x7F).all()), "something was written outside of the result"
    assert bool(around_scales.isnan().all()), "something was written outside of the scales"
    return result, scales if kernel.is_in_blocks else None


def plain(product: Product, kernel: Kernel, function: Any, operands: tuple[Any, ...]) -> Tensor:
    """The result of a kernel that quantises nothing."""
    epilogue, given = forms.seen(function, product.x, operands, kernel.result)
    about = product.scales._replace(out_dtype=kernel.result)
    call = LinearCall(
        epilogue, product.x, product.weight, given, kernel.accumulate, False, True, eight_bits=about
    )
    return resolve.linear(call, kernel.plan())


def check_values(result: Tensor, expected: Tensor, magnitudes: Tensor, scale: Tensor) -> None:
    """Within a rounding of e4m3, one of bf16 (of the epilogue's short forms or of the blocks), and those of sums."""
    exact = (expected / scale).clamp(-LARGEST, LARGEST)
    bound = (exact.abs() * 2.0**-4).clamp(min=2.0**-10) * 1.02
    bound = bound + expected.abs() / scale * 2.0**-8 + (magnitudes * SUMS * 1.2 + 1e-6) / scale
    ratio = ((result.double() - exact).abs() / bound).nan_to_num(math.inf)
    assert float(ratio.max()) <= 1, f"{float(ratio.max())} of the bound"


class TestEveryKernel:
    kernels = EVERY

    def test_values(self, kernel: Quantised) -> None:
        """At ragged sizes, in both orders, the scale by value and on the device; two runs give the same bits."""
        for number, sizes in enumerate([*WHOLE, *RAGGED]):
            product = Product(kernel.of(BF16), sizes, number + kernel.tile)
            function, operands, expected = with_operands(product, number + kernel.tile)
            one: Any = torch.tensor(0.02, device=DEVICE) if number % 2 else 0.02
            result, scales = run(product, kernel, function, operands, one, number % 2)
            each = torch.full_like(expected, 0.02)
            if scales is not None:
                each = scales.double().repeat_interleave(128, -1)[:, : sizes[1]]
            check_values(result, expected, product.magnitudes, each)
            again = run(product, kernel, function, operands, one, number % 2)
            assert same(again[0], result) and (scales is None or torch.equal(again[1], scales))  # type: ignore[arg-type]

    def test_what_is_quantised(self, kernel: Quantised) -> None:
        """Bit for bit the bf16 result of the same instructions, or without a longer epilogue the fp32 one."""
        for number, sizes in enumerate([*WHOLE, *RAGGED]):
            product = Product(kernel.of(BF16), sizes, number)
            function, operands, _ = with_operands(product, number)
            if not kernel.is_in_blocks:
                function, operands = BIAS.traced, (random(sizes[1]),)
            y = plain(product, kernel.like, function, operands)
            result, scales = run(product, kernel, function, operands, 0.02)
            if scales is None:
                assert same(result, (y / y.new_tensor(0.02)).clamp(-LARGEST, LARGEST).to(E4M3))
                continue
            expected = in_blocks(y.cpu())  # whose divisions are not multiplications by reciprocals
            assert torch.equal(scales.cpu(), expected[1]) and same(result.cpu(), expected[0])

    def test_roundings_are_those_of_torch(self, kernel: Quantised, rng: torch.Generator) -> None:
        """Ties, zeros of both signs, subnormals, what saturates, infinities and NaN."""
        host = torch.Generator().manual_seed(int(torch.randint(1 << 30, (), generator=rng)))
        for scale in (1.0, 0.5, 3.0, 2.0**-20, 1e20):
            matrix = special(200, 272, host)
            if kernel.is_in_blocks:  # few rows have an infinity or a NaN, which take their blocks
                matrix[::2] = matrix[::2].nan_to_num(1.0, 7.0, -7.0).clamp(-1e3, 1e3)
            product = Product(kernel.of(BF16), (200, 272, 32), 0)
            product.x.view(torch.uint8).zero_()
            result, scales = run(product, kernel, matrix_itself.traced, (matrix.to(DEVICE),), scale)
            if scales is None:
                assert same(result.cpu(), (matrix / torch.tensor(scale)).clamp(-LARGEST, LARGEST).to(E4M3))
                continue
            expected = in_blocks(matrix.bfloat16())
            assert same(scales.cpu(), expected[1]) and same(result.cpu(), expected[0])

    def test_columns_beyond_the_result(self, kernel: Quantised) -> None:
        """They are computed, of zeros, and do not count in a block's scale."""
        product = Product(kernel.of(BF16), (70, 144, 64), 0)
        operands = (torch.full((144,), 100.0, device=DEVICE),)
        result, scales = run(product, kernel, with_reciprocal.traced, operands, 0.02)
        if scales is None:
            one = torch.full_like(product.exact, 0.02)
            check_values(result, product.exact + 0.01, product.magnitudes, one)
            return
        expected = in_blocks(plain(product, kernel.like, with_reciprocal.traced, operands).cpu())
        assert bool(scales.isfinite().all()) and torch.equal(scales.cpu(), expected[1])
        assert same(result.cpu(), expected[0])


@epigemm.epilogue
def with_reciprocal(acc: Tensor, column: epigemm.PerColumn) -> Tensor:
    """Infinite beyond the result, where columns are 0."""
    result: Tensor = acc + 1.0 / column
    return result


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("scale", [0.02, BLOCKS])
def test_random_calls(scale: Any, accumulate: str, rng: torch.Generator) -> None:
    """Whatever the planner chooses; rows that are not whole 16 bytes are padded and copied."""

    def number(most: int) -> int:
        return int(torch.randint(1, most, (), generator=rng))

    for _ in range(20):
        kernel = Kernel(E4M3, E4M3, BF16, accumulate, 0)
        product = Product(kernel, (number(3000), number(1500), 16 * number(100)), number(6))
        bias = random(product.shape[1]).to(BF16)
        options = product.keywords | {"out_dtype": E4M3, "out_scale": scale}
        found = epigemm.linear_gelu(product.x, product.weight, bias, **options, strict=True)
        each = torch.full_like(product.exact, 0.02)
        if isinstance(found, tuple):
            found, scales = found
            each = scales.double().repeat_interleave(128, -1)[:, : product.shape[1]]
        expected = torch.nn.functional.gelu(product.exact + bias.double())
        check_values(found, expected, product.magnitudes, each)


def test_the_next_layer() -> None:
    """`torch._scaled_mm` takes results in blocks, and their scales, as they are."""
    product = Product(Kernel(E4M3, E4M3, BF16, "promoted", 0), (256, 512, 1024), 5)
    other = Product(Kernel(E4M3, E4M3, BF16, "promoted", 0), (384, 512, 1024), 5)
    options = {"out_dtype": E4M3, "out_scale": BLOCKS}
    (x, x_scales), (weight, weight_scales) = (
        epigemm.linear_gelu(each.x, each.weight, **each.keywords | options) for each in (product, other)
    )
    found = torch._scaled_mm(x, weight.t(), x_scales, weight_scales.t(), out_dtype=BF16)
    factors = [
        each.double() * scales.double().repeat_interleave(128, -1)
        for each, scales in ((x, x_scales), (weight, weight_scales))
    ]
    expected = factors[0] @ factors[1].t()
    assert float((found.double() - expected).abs().max()) <= 0.01 * float(expected.abs().max())


def test_captured() -> None:
    """The scale of a result is read where it lies, also behind the kernel that writes it; blocks are written again."""
    product = Product(Kernel(E4M3, E4M3, BF16, "promoted", 0), (256, 512, 1024), 5)
    scale = torch.tensor(0.05, device=DEVICE)
    for given in (scale, BLOCKS):
        options = product.keywords | {"out_dtype": E4M3, "out_scale": given}
        epigemm.linear_gelu(product.x, product.weight, **options)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            scale.mul_(2)
            captured = epigemm.linear_gelu(product.x, product.weight, **options)
        options["x_scale"].mul_(3)
        graph.replay()
        expected = epigemm.linear_gelu(product.x, product.weight, **options)
        pairs = zip(captured, expected, strict=True) if given is BLOCKS else [(captured, expected)]
        assert all(same(*each) for each in pairs)


def test_batch_invariance() -> None:
    product = Product(Kernel(E4M3, E4M3, BF16, "fast", 0), (300, 512, 1024), 5)
    row = {"x_scale": product.scales.x_scale[17:18]}  # type: ignore[index]
    for scale in (0.02, BLOCKS):
        options = product.keywords | {"out_dtype": E4M3, "out_scale": scale}
        with epigemm.batch_invariant():
            whole = epigemm.linear_gelu(product.x, product.weight, **options)
            alone = epigemm.linear_gelu(product.x[17:18], product.weight, **options | row)
        pairs = zip(whole, alone, strict=True) if scale == BLOCKS else [(whole, alone)]
        assert all(same(each[17:18].contiguous(), other.contiguous()) for each, other in pairs)


def test_the_fallback() -> None:
    """`torch._scaled_mm` or a product in fp32, and PyTorch's division and cast behind it."""
    for number in (1, 6):  # scales of rows, and of tensors
        product = Product(Kernel(E4M3, E4M3, BF16, "fast", 0), (256, 512, 1024), number)
        bias = random(512).to(BF16)
        expected = torch.nn.functional.gelu(product.exact + bias.double())
        for scale in (0.02, eight_bits.memory_of_blocks(BLOCKS, product.x, product.weight)):
            about = product.scales._replace(out_dtype=E4M3, out_scale=scale)
            call = LinearCall(
                gelu_epilogue("none"), product.x, product.weight, (bias,), "fast", False, eight_bits=about
            )
            found = resolve.linear(call, dry_runs.FALLBACK)
            each = torch.full_like(expected, 0.02)
            if isinstance(scale, Tensor):
                each = scale.t().double().repeat_interleave(128, -1)
            check_values(found, expected, product.magnitudes, each)
