"""What kernels of 8-bit numbers quantise, bit for bit, and public calls with results of every type.

Results in blocks are those of the bf16 kernel, quantised by PyTorch; results with one scale those of the fp32 kernel,
where the epilogue is exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import epigemm
from epigemm.arguments.calls import BLOCKS
from epigemm.calls import resolve
from epigemm.epilogues.library import BIAS, gelu_epilogue
from epigemm.planner import dry_runs
from tests.gpu.launching import DEVICE, captured, gated
from tests.gpu.test_fp8 import (
    BF16,
    E4M3,
    FP16,
    FP32,
    PAIRS,
    QUANTISED,
    RAGGED,
    SUMS,
    WHOLE,
    Behind,
    Kernel,
    Product,
    behind,
    parts,
    random,
    wide,
)
from tests.ops.eight_bits import cast, in_blocks, same
from tests.ops.test_eight_bit_results import matrix_itself, special

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

SCALES: tuple[Any, ...] = (None, 0.02, BLOCKS)
"""Of results, None of those in 16 or 32 bits."""
accumulations = pytest.mark.parametrize("accumulate", ["promoted", "fast"])
recipes = pytest.mark.parametrize("accumulate", ["promoted", "fast", "blocks"])
"""The sums of products of tensors with one scale, or of rows; and promoted ones with scales of blocks."""


def like(kernel: Kernel) -> Kernel:
    """One that gives what is quantised: it multiplies by the same instructions."""
    if kernel.is_pair:
        return kernel._replace(result=BF16, scale=None, tile=1)
    if kernel.scale == BLOCKS:
        return kernel._replace(result=BF16, scale=None, tile=0 if kernel.accumulate == "fast" else 4)
    return kernel._replace(result=FP32, scale=None, tile=kernel.tile if kernel.tile < 3 else 0)


def quantised(y: Tensor, kernel: Kernel, scale: float = 0.02) -> tuple[Tensor, ...]:
    """By PyTorch, on the CPU: its divisions are not multiplications by reciprocals."""
    return in_blocks(y.bfloat16().cpu()) if kernel.scale == BLOCKS else (cast(y.cpu() / torch.tensor(scale)),)


class TestWhatIsQuantised:
    kernels = (*QUANTISED, *(each for each in PAIRS if each.scale == BLOCKS))

    def test_what_is_quantised(self, kernel: Kernel) -> None:
        """The bf16 result of the same instructions, or without a longer epilogue the fp32 one."""
        for number, sizes in enumerate(WHOLE if kernel.is_pair else [*WHOLE, *RAGGED]):
            product = Product(kernel, sizes, number)
            given = behind(product, number)
            if kernel.scale != BLOCKS:
                given = given._replace(function=BIAS.traced, operands=(random(sizes[1]),))
            (y,) = product.run(given, like(kernel))
            assert same(product.run(given), quantised(y, kernel))


class TestQuantised:
    kernels = QUANTISED

    def test_roundings_are_those_of_torch(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Ties, zeros of both signs, subnormals, what saturates, infinities and NaN."""
        host = torch.Generator().manual_seed(int(torch.randint(1 << 30, (), generator=rng)))
        for scale in (1.0, 0.5, 3.0, 2.0**-20, 1e20):
            matrix = special(200, 272, host)
            if kernel.scale == BLOCKS:  # few rows have an infinity or a NaN, which take their blocks
                matrix[::2] = matrix[::2].nan_to_num(1.0, 7.0, -7.0).clamp(-1e3, 1e3)
            product = Product(kernel, (200, 272, 32), 0)
            product.x.view(torch.uint8).zero_()
            itself = Behind(matrix_itself.traced, (matrix.to(DEVICE),), *product.exact, *product.magnitudes)
            assert same(product.run(itself, scale=scale), quantised(matrix, kernel, scale))

    def test_columns_beyond_the_result(self, kernel: Kernel) -> None:
        """They are computed, of zeros, and do not count in a block's scale."""
        product = Product(kernel, (70, 144, 64), 0)
        operands, (z,), (magnitudes,) = (
            (torch.full((144,), 100.0, device=DEVICE),),
            product.exact,
            product.magnitudes,
        )
        given = Behind(with_reciprocal.traced, operands, z + 0.01, magnitudes * SUMS * 1.2 + 1e-6)
        result, *scales = found = product.run(given)
        if not scales:
            product.check(result, given.expected, given.by_sums)
            return
        assert bool(scales[0].isfinite().all())
        (y,) = product.run(given, like(kernel))
        assert same(found, quantised(y, kernel))


@epigemm.epilogue
def with_reciprocal(acc: Tensor, column: epigemm.PerColumn) -> Tensor:
    """Infinite beyond the result, where columns are 0."""
    result: Tensor = acc + 1.0 / column
    return result


# --- calls -----------------------------------------------------------------------------------------------------------


def kernel_to(
    scale: Any, accumulate: str = "promoted", wide: torch.dtype = BF16, *, is_pair: bool = False
) -> Kernel:
    """Whose types a call has; `wide`: of a result without a scale."""
    sums, is_in_blocks = ("promoted" if accumulate == "blocks" else accumulate), accumulate == "blocks"
    return Kernel(E4M3, E4M3, wide if scale is None else E4M3, sums, 0, scale, is_pair, is_in_blocks)


@recipes
@pytest.mark.parametrize("scale", SCALES)
def test_random_calls(scale: Any, accumulate: str, rng: torch.Generator) -> None:
    """Whatever the planner chooses; rows that are not whole 16 bytes are padded and copied."""

    def number(most: int) -> int:
        return int(torch.randint(1, most, (), generator=rng))

    for _ in range(20):
        kernel = kernel_to(scale, accumulate, (BF16, FP16, FP32)[number(4) - 1])
        product = Product(kernel, (number(3000), number(1500), 16 * number(100)), number(6))
        bias = random(product.shape[1]).to(kernel.of_operands)
        found = epigemm.linear_gelu(product.x, product.weight, bias, **product.keywords, strict=True)
        expected = functional.gelu(product.exact[0] + bias.double())
        product.check(found, expected, product.magnitudes[0] * SUMS * 1.2 + 1e-6)


@recipes
@pytest.mark.parametrize(
    ("result", "scale"), [(BF16, None), (FP32, None), (E4M3, 0.02), (E4M3, BLOCKS)], ids=str
)
def test_linear_glu(result: torch.dtype, scale: Any, accumulate: str) -> None:
    """Whatever the planner chooses, also at sizes at which two kernels run, which round the second product, too."""
    for number, sizes in enumerate([*WHOLE, *RAGGED]):
        pair = Product(kernel_to(scale, accumulate, result, is_pair=True), sizes, number)
        activation, errors = ("silu", "gelu")[number % 2], [each * SUMS * 1.2 for each in pair.magnitudes]
        expected, by_sums = gated(getattr(functional, activation), pair.exact, errors)
        options = {"weight2": pair.weight2, "activation": activation, **pair.keywords}
        found = epigemm.linear_glu(pair.x, pair.weight, **options)
        pair.check(found, expected, by_sums + 2.0**-7 * expected.abs() + 1e-4)


@accumulations
@pytest.mark.parametrize("scale", SCALES)
def test_pairs_are_one_kernel(scale: Any, accumulate: str) -> None:
    pair = Product(kernel_to(scale, accumulate, is_pair=True), (512, 1024, 1024), 1)
    found = epigemm.explain(epigemm.linear_glu, pair.x, pair.weight, weight2=pair.weight2, **pair.keywords)
    assert len(found.kernels) == 1 + (accumulate == "promoted" and scale == BLOCKS), found


def test_the_next_layer() -> None:
    """`torch._scaled_mm` takes results in blocks, and their scales, as they are; so does epigemm."""
    product, other = (Product(kernel_to(BLOCKS), (m, 512, 1024), 5) for m in (256, 384))
    (x, x_scales), (weight, weight_scales) = (
        epigemm.linear_gelu(each.x, each.weight, **each.keywords) for each in (product, other)
    )
    found = torch._scaled_mm(x, weight.t(), x_scales, weight_scales.t(), out_dtype=BF16)
    factors = [
        each.double() * scales.double().repeat_interleave(128, -1)
        for each, scales in ((x, x_scales), (weight, weight_scales))
    ]
    expected = factors[0] @ factors[1].t()
    assert float((found.double() - expected).abs().max()) <= 0.01 * float(expected.abs().max())
    next_one = Product(kernel_to(None, "blocks"), (256, 384, 512), 5)
    found = epigemm.linear(x, next_one.weight, **next_one.keywords | {"x_scale": x_scales}, strict=True)
    weight, of_weight = next_one.weight.double(), wide(next_one.weight_scale, 128, 384, 512)
    expected = factors[0] @ (weight * of_weight).t()
    assert float((found.double() - expected).abs().max()) <= 0.01 * float(expected.abs().max())


@recipes
@pytest.mark.parametrize("scale", SCALES)
def test_captured(scale: Any, accumulate: str) -> None:
    """Scales are read where they lie, a result's also behind the kernel that writes it; blocks are written again."""
    of_result = torch.tensor(0.05, device=DEVICE)
    product = Product(kernel_to(of_result if scale == 0.02 else scale, accumulate), (256, 512, 1024), 5)
    options, found = product.keywords, list[Any]()

    def call() -> None:
        of_result.mul_(2)
        found.append(epigemm.linear_gelu(product.x, product.weight, **options))

    graph = captured(call)
    options["x_scale"].mul_(3)
    graph.replay()
    assert same(found[-1], epigemm.linear_gelu(product.x, product.weight, **options))


@pytest.mark.parametrize("accumulate", ["fast", "blocks"])
@pytest.mark.parametrize("scale", SCALES)
def test_batch_invariance(scale: Any, accumulate: str) -> None:
    product = Product(kernel_to(scale, accumulate), (300, 512, 1024), 5)
    options = product.keywords
    row = options | {"x_scale": options["x_scale"][17:18]}
    with epigemm.batch_invariant():
        whole = epigemm.linear_gelu(product.x, product.weight, **options)
        alone = epigemm.linear_gelu(product.x[17:18], product.weight, **row)
    assert same(tuple(each[17:18] for each in parts(whole)), parts(alone))


@pytest.mark.parametrize(
    ("number", "accumulate", "k"),
    [(0, "fast", 1024), (1, "fast", 1024), (6, "fast", 1024), (0, "blocks", 1024), (1, "blocks", 1040)],
)
@pytest.mark.parametrize(
    ("result", "scale"), [(BF16, None), (FP32, None), (E4M3, 0.02), (E4M3, BLOCKS)], ids=str
)
def test_the_fallback(result: torch.dtype, scale: Any, number: int, accumulate: str, k: int) -> None:
    """`torch._scaled_mm` or a product in fp32, and what follows it in kernels of its own."""
    kernel = kernel_to(scale, accumulate, result)
    product, bias = Product(kernel, (256, 512, k), number), random(512).to(kernel.of_operands)
    expected = functional.gelu(product.exact[0] + bias.double())
    given = Behind(gelu_epilogue("none"), (bias,), expected, product.magnitudes[0] * SUMS * 1.2 + 1e-6)
    memory = torch.empty(4, 256, device=DEVICE) if scale == BLOCKS else scale
    found = resolve.linear(product.call(kernel, given, memory), dry_runs.FALLBACK)
    # `_scaled_mm` rounds a product to 16 bits, which is rounded again.
    twice = 0.01 * expected.abs().max() if scale is None else 0.0
    product.check((found, memory.t()) if scale == BLOCKS else found, expected, given.by_sums + twice)
