"""The kernels of pairs of products of 8-bit numbers: against float64 of the dequantised inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments import forms
from epigemm.arguments.calls import EightBits, LinearCall, operand_dtype
from epigemm.calls import resolve
from epigemm.epilogues.formulas import BIAS2
from epigemm.epilogues.library import FUNCTIONS
from tests.gpu.launching import DEVICE, Sizes
from tests.gpu.test_fp8 import BF16, E4M3, FP16, FP32, RAGGED, SUMS, Kernel, random
from tests.gpu.test_fp8_results import BLOCKS, LARGEST, WHOLE, check_values, memory_of
from tests.ops.test_eight_bit_results import in_blocks, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]


class Pair(NamedTuple):
    """A tile of a pair of products, and its results: a type of 16 or 32 bits, a scale, or blocks."""

    result: torch.dtype
    scale: float | str | None
    accumulate: str
    tile: int

    def __str__(self) -> str:
        result = str(self.result).removeprefix("torch.") if self.scale is None else f"e4m3-{self.scale}"
        return f"{result}-{self.accumulate}-{self.tile}"

    def plan(self, raster: int = 0) -> tuple[int, ...]:
        return Kernel(E4M3, E4M3, self.result, self.accumulate, self.tile).plan(raster)


PAIRS = [
    *(Pair(result, None, "fast", 0) for result in (BF16, FP16, FP32)),
    *(Pair(result, None, "promoted", 0) for result in (BF16, FP16, FP32)),
    Pair(BF16, None, "fast", 1),
    Pair(E4M3, 0.02, "fast", 0),
    Pair(E4M3, 0.02, "fast", 1),
    Pair(E4M3, 0.02, "promoted", 0),
    Pair(E4M3, BLOCKS, "fast", 0),
]


class Products:
    """Random factors of two products with scales, their products with biases in float64, and the sums' magnitudes."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        m, n, k = sizes
        self.shape = (m, n)
        self.x, both = random(m, k).to(E4M3), random(2 * n, k).to(E4M3)
        self.weights = both.chunk(2)
        self.x_scale = (
            torch.rand(m, device=DEVICE) / 8 + 0.01 if number % 2 else torch.tensor(0.05, device=DEVICE)
        )
        rows, one = torch.rand(2 * n, device=DEVICE) + 0.5, torch.tensor(1.5, device=DEVICE)
        self.weight_scale = rows if number % 3 else one
        factor = self.x_scale.double().reshape(-1, 1) * self.weight_scale.double().reshape(1, -1)
        self.products = ((self.x.double() @ both.double().t()) * factor).chunk(2, -1)
        self.magnitudes = ((self.x.double().abs() @ both.double().abs().t()) * factor).chunk(2, -1)

    def run(
        self, kernel: Pair, function: Any, operands: tuple[Any, ...], raster: int = 0
    ) -> tuple[Tensor, Any]:
        """One kernel's result, in poisoned memory, and the scales of its blocks."""
        m, n = self.shape
        memory, around_scales = memory_of(m, n)
        scale = memory if kernel.scale == BLOCKS else kernel.scale
        about = EightBits(self.x_scale, self.weight_scale, kernel.result, kernel.accumulate, scale)
        epilogue = forms.of_types(function, self.x, operands, operand_dtype(about))
        step = 16 // kernel.result.itemsize
        around = torch.full((m + 2, n + -n % step + 2 * step), math.nan, device=DEVICE).to(kernel.result)
        out = around[1 : m + 1, step : n + step]
        call = LinearCall(epilogue, self.x, self.weights[0], operands, kernel.accumulate, False, True, False, out,
                          self.weights[1], eight_bits=about)  # fmt: skip
        result = resolve.linear(call, kernel.plan(raster)).clone()
        scales = memory.t().clone()
        out.view(torch.uint8).fill_(0x7F) if kernel.result is E4M3 else out.fill_(math.nan)
        memory.fill_(math.nan)
        assert bool(around.float().isnan().all()), "something was written outside of the result"
        assert bool(around_scales.isnan().all()), "something was written outside of the scales"
        return result, scales if kernel.scale == BLOCKS else None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def gated(pair: Products, number: int, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], Tensor, Tensor]:
    """A function of a pair, its operands, what it gives, and what an error of the sums makes of it."""
    n = pair.shape[1]
    activation = ("silu", "gelu")[number % 2]
    name = "gated_" + activation
    biases = [random(n).to(dtype if number % 3 else FP32) for _ in range(2)]
    first, second = (z + bias.double() for z, bias in zip(pair.products, biases, strict=True))
    operands: tuple[Any, ...] = (*biases, None)
    if number % 4 == 3:  # without biases
        first, second = pair.products
        operands = (None, None)
    else:
        name += BIAS2
    activated = ACTIVATIONS[activation](first)
    error = pair.magnitudes[0] * 1.13 * second.abs() + activated.abs() * pair.magnitudes[1]
    return FUNCTIONS[name], operands, activated * second, error * SUMS * 1.1 + 1e-5


class TestPairs:
    kernels = PAIRS

    def test_values(self, kernel: Pair) -> None:
        for number, sizes in enumerate(WHOLE):
            pair = Products(sizes, number)
            dtype = BF16 if kernel.result is E4M3 else kernel.result
            function, operands, expected, error = gated(pair, number, dtype)
            result, scales = pair.run(kernel, function, operands, number % 2)
            assert same(pair.run(kernel, function, operands, number % 2)[0], result)
            if kernel.scale is None:
                bound = expected.abs() * torch.finfo(dtype).eps * 1.01 + error
                ratio = ((result.double() - expected).abs() / bound).nan_to_num(math.inf)
                assert float(ratio.max()) <= 1, f"{kernel}: {float(ratio.max())} of the bound"
                continue
            each = torch.full_like(expected, 0.02)
            if scales is not None:
                each = scales.double().repeat_interleave(128, -1)[:, : sizes[1]]
            check_values(result, expected, error / SUMS, each)


def test_blocks_of_pairs() -> None:
    """Bit for bit the bf16 result of the same instructions, quantised."""
    for number, sizes in enumerate(WHOLE):
        pair = Products(sizes, number)
        function, operands, *_ = gated(pair, number, BF16)
        result, scales = pair.run(Pair(E4M3, BLOCKS, "fast", 0), function, operands)
        y, _ = pair.run(Pair(BF16, None, "fast", 1), function, operands)
        expected = in_blocks(y.cpu())
        assert torch.equal(scales.cpu(), expected[1]) and same(result.cpu(), expected[0])


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("options", [{}, {"out_dtype": FP32}, {"out_dtype": E4M3, "out_scale": 0.02},
                                     {"out_dtype": E4M3, "out_scale": BLOCKS}], ids=str)  # fmt: skip
def test_linear_glu(options: dict[str, Any], accumulate: str) -> None:
    """Whatever the planner chooses, also at sizes at which two kernels run."""
    for number, sizes in enumerate([*WHOLE, *RAGGED]):
        pair = Products(sizes, number)
        activation = ("silu", "gelu")[number % 2]
        scales: dict[str, Any] = {
            "x_scale": pair.x_scale,
            "weight_scale": pair.weight_scale,
            "accumulate": accumulate,
        }
        weight, weight2 = pair.weights
        found = epigemm.linear_glu(
            pair.x, weight, weight2=weight2, activation=activation, **scales, **options
        )
        first, second = pair.products
        expected = ACTIVATIONS[activation](first) * second
        each = torch.full_like(expected, 0.02)
        if isinstance(found, tuple):
            found, of_blocks = found
            each = of_blocks.double().repeat_interleave(128, -1)[:, : sizes[1]]
        activated = ACTIVATIONS[activation](first)
        error = pair.magnitudes[0] * 1.13 * second.abs() + activated.abs() * pair.magnitudes[1]
        # Two kernels round the second product, too.
        bound = expected.abs() * 2.0**-7 + error * SUMS * 1.2 + 1e-4
        if "out_scale" in options:
            bound = bound + torch.maximum(expected.abs() * 2.0**-4, each * 2.0**-10)
            expected = torch.clamp(expected, -LARGEST * each, LARGEST * each)
        got = found.double() * (each if "out_scale" in options else 1)
        ratio = ((got - expected).abs() / bound).nan_to_num(math.inf)
        assert float(ratio.max()) <= 1, f"{sizes}: {float(ratio.max())} of the bound"


def test_pairs_are_one_kernel() -> None:
    pair = Products((512, 1024, 1024), 1)
    scales: dict[str, Any] = {"x_scale": pair.x_scale, "weight_scale": pair.weight_scale}
    weight, weight2 = pair.weights
    for accumulate in ("fast", "promoted"):
        every: list[dict[str, Any]] = [
            {},
            {"out_dtype": E4M3, "out_scale": 0.1},
            {"out_dtype": E4M3, "out_scale": BLOCKS},
        ]
        for options in every:
            found = epigemm.explain(
                epigemm.linear_glu,
                pair.x,
                weight,
                weight2=weight2,
                accumulate=accumulate,
                **scales,
                **options,
            )
            two = accumulate == "promoted" and options.get("out_scale") == BLOCKS
            assert len(found.kernels) == 1 + two, found
