"""The mma.sync kernels with forced plans, also on GPUs other than Hopper, where nobody has run them yet.

The tests of `test_fused_gpu` and `test_epilogue_operands_gpu` take these tiles, too, with rows of whole 16 bytes. Here
are the tests of what only this family does, or does in another way.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings.products import forced_into
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.registry import typed
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, TF32, Arithmetic
from tests.support.cases import LINEAR, mma_unavailable
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, make

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TILES = range(plans.tile_count(plans.MMA, "16_bits"))
IN_TF32 = range(plans.tile_count(plans.MMA, "tf32"))
BY_ELEMENTS = (8, 9)  # csrc/gemm/sm80_mma/tiles.h
SIZES = [(1, 1, 1), (1, 1000, 513), (33, 65, 17), (129, 255, 63), (200, 1031, 100), (16, 64, 4097)]
types = pytest.mark.parametrize("arithmetic", [FP16, BF16], ids=lambda each: each.name)
by_elements = pytest.mark.parametrize("tile", BY_ELEMENTS)


@pytest.fixture(autouse=True)
def every_tile_runs() -> None:
    if reason := mma_unavailable():
        pytest.skip(f"gpu: {reason}")


def run(problem: Problem, tile: int, swizzle: int = 1, raster: int = 0) -> Tensor:
    found = problem.run_fused(plans.numbers(plans.MMA, tile, raster, swizzle))
    assert found is not None
    problem.check(found, second_path=False)
    return found


@pytest.mark.parametrize("name", LINEAR)
@types
@by_elements
def test_rows_of_any_length(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    for shape in SIZES:
        run(make(name, arithmetic, shape, DEVICE, rng), tile)


@types
@by_elements
@pytest.mark.parametrize(
    "layout", ["padded_rows", "aligned_rows", "odd_rows", "every_second_row", "misaligned"]
)
def test_rows_that_lie_anywhere(arithmetic: Arithmetic, tile: int, layout: str, rng: torch.Generator) -> None:
    change = LAYOUTS[layout]
    for shape in SIZES:
        run(make("bias_relu", arithmetic, shape, DEVICE, rng, x_layout=change), tile)
        run(make("bias_relu", arithmetic, shape, DEVICE, rng, weight_layout=change), tile)


@types
def test_lengths_of_k(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Fewer stages than the ring has, as many, and more."""
    for tile in TILES:
        for k in (8, 24, 32, 64, 72, 96, 128, 192, 200, 256, 1000):
            run(make("bias", arithmetic, (130, 136, k), DEVICE, rng), tile)


@pytest.mark.parametrize("arithmetic", [FP16, BF16, TF32], ids=lambda each: each.name)
def test_more_tiles_than_multiprocessors(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Of the large tiles a CTA computes several: of K less than its ring has, and more."""
    rows = 128 * torch.cuda.get_device_properties(DEVICE).multi_processor_count // 4
    for tile in IN_TF32 if arithmetic is TF32 else TILES:
        for k in (8, 72, 520):
            run(make("bias_gelu", arithmetic, (rows + 5, 2568, k), DEVICE, rng), tile, swizzle=8)


@types
def test_a_row_does_not_depend_on_the_others(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    whole = make("bias_gelu", arithmetic, (300, 264, 520), DEVICE, rng)
    for tile in TILES:
        every = run(whole, tile)
        for rows in (1, 17, 128):
            part = Problem(whole.name, arithmetic, whole.x[:rows], whole.weight, whole.operands)
            assert torch.equal(run(part, tile), every[:rows])


@types
def test_special_values_stay_in_their_row(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    m, n, k = 150, 200, 104
    x, weight = (torch.randn(rows, k, device=DEVICE).to(arithmetic.dtype) for rows in (m, n))
    clean = x.clone()
    x[3, 5], x[77, 0], x[149, 103] = math.nan, math.inf, -math.inf
    spoiled = torch.zeros(m, dtype=torch.bool, device=DEVICE)
    spoiled[[3, 77, 149]] = True
    for tile in TILES:
        outs = [torch.full((m, n), math.nan, device=DEVICE, dtype=arithmetic.dtype) for _ in range(2)]
        for out, left in zip(outs, (x, clean), strict=True):
            forced_into(
                out, "relu_div", left, weight, "ieee", scalars=[2.0], plan=plans.numbers(plans.MMA, tile)
            )
        assert torch.equal(outs[0][~spoiled], outs[1][~spoiled]) and outs[1].isfinite().all()
        assert outs[0][3].isnan().all()
        expected = (x[77].double() @ weight.double().t()).relu() / 2
        assert torch.equal(outs[0][77].isinf(), expected.isinf())


@epigemm.epilogue
def every_kind(acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix, more: Matrix, by: Scalar) -> Tensor:
    return (acc + bias) * row + by * other - more


@types
@by_elements
@pytest.mark.parametrize("is_wide", [False, True], ids=["16 bits", "fp32"])
def test_operands_of_every_kind(arithmetic: Arithmetic, tile: int, is_wide: bool) -> None:
    """Of whole numbers, so that the result is exact to its one rounding."""
    m, n, k = 131, 257, 67
    dtype = torch.float32 if is_wide else arithmetic.dtype

    def drawn(*shape: int, of: torch.dtype = arithmetic.dtype) -> Tensor:
        return torch.randint(-2, 3, shape, device=DEVICE).to(of)

    x, weight = drawn(m, k), drawn(n, k)
    operands = [
        drawn(n, of=dtype),
        drawn(m, 1, of=dtype),  # as the native module takes a number for each row
        drawn(m, n, of=dtype),
        drawn(m, n + 1, of=dtype)[:, 1:],
    ]
    out = torch.full((m, n), math.nan, device=DEVICE, dtype=arithmetic.dtype)
    epilogue = typed(every_kind.traced, [is_wide] * 4 + [True])
    forced_into(
        out,
        epilogue.name,
        x,
        weight,
        "ieee",
        operands=operands,
        scalars=[3.0],
        plan=plans.numbers(plans.MMA, tile),
    )
    bias, row, other, more = (each.double() for each in operands)
    expected = (x.double() @ weight.double().t() + bias) * row + 3 * other - more
    assert torch.equal(out, expected.to(arithmetic.dtype))


def test_a_tile_by_elements_reads_rows_alone(rng: torch.Generator) -> None:
    problem = make("bias", BF16, (64, 65, 64), DEVICE, rng, x_layout=LAYOUTS["transposed"])
    with pytest.raises(RuntimeError, match="plan: x is not a row-major matrix"):
        problem.run_fused(plans.numbers(plans.MMA, BY_ELEMENTS[0]))


@pytest.mark.parametrize("k", [4, 8, 12, 16, 20, 32, 36, 48, 64, 96, 100, 1000])
def test_lengths_of_k_in_tf32(k: int, rng: torch.Generator) -> None:
    for tile in IN_TF32:
        run(make("bias", TF32, (130, 136, k), DEVICE, rng), tile)


def test_a_row_in_tf32_does_not_depend_on_the_others(rng: torch.Generator) -> None:
    whole = make("bias_gelu", TF32, (300, 264, 520), DEVICE, rng)
    for tile in IN_TF32:
        every = run(whole, tile)
        for rows in (1, 17, 128):
            part = Problem(whole.name, TF32, whole.x[:rows], whole.weight, whole.operands)
            assert torch.equal(run(part, tile), every[:rows])


@pytest.mark.parametrize("is_x", [True, False], ids=["x", "weight"])
def test_tf32_is_the_nearest(is_x: bool) -> None:
    """Of both operands, ties away from zero; infinities and NaNs stay."""
    step = 2.0**-10  # of TF32 between 1 and 2
    given = [
        1.0,
        1 + step / 4,
        1 + step / 2,
        1 + 3 * step / 4,
        -1 - step / 2,
        -1 - step / 4,
        math.inf,
        math.nan,
    ]
    wanted = [1.0, 1.0, 1 + step, 1 + step, -1 - step, -1.0, math.inf, math.nan]
    numbers = torch.tensor(given, device=DEVICE)
    row = torch.zeros(8, 8, device=DEVICE)
    row[:, 0] = numbers
    ones = torch.zeros(8, 8, device=DEVICE)
    ones[:, 0] = 1
    x, weight = (row, ones) if is_x else (ones, row)
    expected = torch.tensor(wanted, device=DEVICE)[:, None].expand(8, 8)
    for tile in IN_TF32:
        out = torch.full((8, 8), -1.0, device=DEVICE)
        forced_into(out, "bias", x, weight, "tf32", plan=plans.numbers(plans.MMA, tile))
        found = out if is_x else out.t()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.0, 7.0), expected.nan_to_num(0.0, 7.0))
