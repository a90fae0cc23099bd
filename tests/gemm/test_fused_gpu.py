"""The Hopper kernels by themselves: every tile, raster and swizzle, edges of tiles, and what they must refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks.gradings import products
from epigemm._native import build_info
from epigemm.planner import dry_runs
from tests.support import plans, reference
from tests.support.arithmetic import BF16, FP16, FP32, FP64, FUSED_ARITHMETICS, TF32, Arithmetic
from tests.support.cases import LINEAR, draw_operands, has_bias, poisoned, signed
from tests.support.layouts import LAYOUTS
from tests.support.problems import EMPTY_SHAPES, Problem, make, ternary

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

arithmetics = pytest.mark.parametrize("arithmetic", FUSED_ARITHMETICS, ids=lambda a: a.name)
epilogues = pytest.mark.parametrize("name", LINEAR)

# Family and tile of each kernel that multiplies tensors as they are; one where none is built, to be seen as skipped.
KERNELS = [
    (family, tile) for family in plans.FAMILIES for tile in range(plans.tile_count(family, "tf32"))
] or [(plans.TMA, 0)]
FOR_16_BITS = [
    (family, tile)
    for family in plans.FAMILIES
    for tile in range(plans.tile_count(family, "tf32"), plans.tile_count(family, "16_bits"))
] or [(plans.TMA, 0)]
FEW_ROWS = [tile for family, tile in KERNELS if family == plans.SWAP_AB] or [0]
LARGE, SMALL = plans.numbers(plans.TMA), plans.numbers(plans.SWAP_AB)
kernels = pytest.mark.parametrize(
    ("family", "tile"), KERNELS, ids=[f"{family}-{tile}" for family, tile in KERNELS]
)
RASTERS = {"along_m": 0, "along_n": 1}
SWIZZLES = [1, 2, 4, 8]
DEVICE = torch.device("cuda")


def explained(problem: Problem) -> dict[str, Any]:
    found = dry_runs.dry_run(problem.call(problem.out()), tried=True)
    return found.tried[0].plan


def run_plan(problem: Problem, plan: list[int]) -> torch.Tensor:
    actual = problem.run_fused(plan)
    assert actual is not None, f"declined plan {plan}: {explained(problem)['why_not']}"
    problem.check(actual, second_path=False)
    return actual


def test_tile_count() -> None:
    """Every tile that calls may choose is built for every epilogue and element type."""
    kinds = {"16_bits": 2, "tf32": 1, "split": 1, "scaled": 1}  # and the element types of each
    built = sum(
        count * tiles.get(kind, 0)
        for family, tiles in plans.FAMILIES.items()
        for kind, count in kinds.items()
        if family != plans.MMA
    )
    assert build_info()["gemm_kernels"] == built
    assert sum(tiles.get("tf32", 0) for tiles in plans.FAMILIES.values()) == len(KERNELS)


@epilogues
@arithmetics
@kernels
def test_every_tile(name: str, arithmetic: Arithmetic, family: str, tile: int, rng: torch.Generator) -> None:
    for shape in [(384, 512, 256), (129, 264, 136), (1, 8, 8), (200, 1032, 64)]:
        for swizzle in (1, 4):
            plan = plans.numbers(family, tile, swizzle % 2, swizzle)
            run_plan(make(name, arithmetic, shape, DEVICE, rng), plan)


@epilogues
@pytest.mark.parametrize("arithmetic", [FP16, BF16], ids=lambda a: a.name)
@pytest.mark.parametrize(("family", "tile"), FOR_16_BITS)
def test_every_tile_for_16_bits_alone(
    name: str, arithmetic: Arithmetic, family: str, tile: int, rng: torch.Generator
) -> None:
    for shape in [(384, 512, 256), (129, 264, 136), (1, 8, 8), (200, 1032, 64)]:
        for swizzle in (1, 4):
            plan = plans.numbers(family, tile, swizzle % 2, swizzle)
            run_plan(make(name, arithmetic, shape, DEVICE, rng), plan)


@pytest.mark.parametrize(("family", "tile"), [*KERNELS, *FOR_16_BITS])
@pytest.mark.parametrize("raster", RASTERS.values(), ids=RASTERS.keys())
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_every_raster_and_swizzle(
    family: str, tile: int, raster: int, swizzle: int, rng: torch.Generator
) -> None:
    """Which tile is computed when must not matter: the same bits for every order, and all of them right."""
    for name in LINEAR:
        for shape in [(1100, 1304, 96), (3000, 136, 64), (72, 4104, 64)]:
            problem = make(name, BF16, shape, DEVICE, rng)
            actual = run_plan(problem, plans.numbers(family, tile, raster, swizzle))
            assert torch.equal(actual, run_plan(problem, plans.numbers(family, tile)))


@epilogues
@arithmetics
@pytest.mark.parametrize("tile", FEW_ROWS)
def test_every_split(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """K shared out evenly, unevenly and one stage each; the bits are the same at every call."""
    for shape in [(17, 264, 1024), (129, 136, 1160), (1, 72, 520), (300, 520, 2048)]:
        problem = make(name, arithmetic, shape, DEVICE, rng)
        for splits in (1, 2, 4, 8):
            plan = plans.numbers(plans.SWAP_AB, tile, splits=splits)
            assert torch.equal(run_plan(problem, plan), run_plan(problem, plan))


@pytest.mark.parametrize(
    ("family", "words"),
    [(plans.TMA, "splits must be 1 for a large tile, got 2"), (plans.SWAP_AB, "K is too short for 2 splits")],
)
def test_a_split_that_cannot_be_is_refused(family: str, words: str, rng: torch.Generator) -> None:
    problem = make("bias", BF16, (16, 128, 64), DEVICE, rng)
    with pytest.raises(RuntimeError, match=f"plan: {words}"):
        problem.run_fused(plans.numbers(family, splits=2))
    with pytest.raises(RuntimeError, match="plan: splits must be 1, 2, 4 or 8, got 3"):
        problem.run_fused(plans.numbers(family, splits=3))


@arithmetics
@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 128, 129, 192, 200, 255, 257])
def test_tile_edges(arithmetic: Arithmetic, m: int, rng: torch.Generator) -> None:
    for name in LINEAR:
        for n in [8, 64, 120, 128, 136, 192, 200, 248, 256, 264]:
            problem = make(name, arithmetic, (m, n, 72), DEVICE, rng)
            actual = problem.run_fused()
            if actual is None:
                assert not explained(problem)["fused"]
                actual = run_plan(problem, plans.numbers(*KERNELS[n % len(KERNELS)]))
            problem.check(actual, second_path=False)


@arithmetics
@pytest.mark.parametrize("size", [127, 128, 129, 255, 257, 64, 63, 192, 200])
def test_any_size_through_the_public_op(arithmetic: Arithmetic, size: int, rng: torch.Generator) -> None:
    """Odd N or K declines the fused kernel; whoever answers is right."""
    for name in LINEAR:
        for shape in [(size, 128, 64), (128, size, 64), (128, 128, size), (size, size, size)]:
            problem = make(name, arithmetic, shape, DEVICE, rng)
            problem.check(problem.run(), second_path=True)


@arithmetics
@pytest.mark.parametrize("k", [8, 16, 24, 40, 56, 64, 72, 128, 1000, 8192])
def test_lengths_of_k(arithmetic: Arithmetic, k: int, rng: torch.Generator) -> None:
    for family, tile in KERNELS:
        run_plan(make("bias", arithmetic, (130, 136, k), DEVICE, rng), plans.numbers(family, tile))


@epilogues
@arithmetics
@pytest.mark.parametrize("layout", ["padded_rows", "every_second_row"])
def test_strided_operands_stay_fused(
    name: str, arithmetic: Arithmetic, layout: str, rng: torch.Generator
) -> None:
    """Row strides of whole 16-byte units cost nothing: x, weight and out may all have them."""
    change = LAYOUTS[layout]
    problem = make(name, arithmetic, (256, 256, 128), DEVICE, rng, x_layout=change, weight_layout=change)
    for plan in (LARGE, SMALL):
        run_plan(problem, plan)


@epilogues
def test_vectors_need_no_alignment(name: str, rng: torch.Generator) -> None:
    """Bias and folded vectors are read element by element."""
    for arithmetic in FUSED_ARITHMETICS:
        problem = make(name, arithmetic, (256, 256, 128), DEVICE, rng)
        problem.operands = problem.operands.map(LAYOUTS["misaligned"])
        for plan in (LARGE, SMALL):
            run_plan(problem, plan)
        problem.check(problem.run(), second_path=True)
        problem.operands = problem.operands.map(lambda v: v.repeat_interleave(2)[::2] if v.dim() else v)
        problem.check(problem.run(), second_path=True)


@epilogues
@arithmetics
def test_absent_bias_and_tensor_scalars(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    for with_bias in (True, False):
        for tensor_scalars in (True, False):
            problem = make(
                name,
                arithmetic,
                (256, 256, 128),
                DEVICE,
                rng,
                with_bias=with_bias and has_bias(name),
                tensor_scalars=tensor_scalars,
            )
            for plan in (LARGE, SMALL):
                run_plan(problem, plan)


@epilogues
@arithmetics
def test_integers_are_exact(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    m, n, k = 300, 520, 1024
    x = ternary((m, k), rng).to(DEVICE, arithmetic.dtype)
    weight = ternary((n, k), rng).to(DEVICE, arithmetic.dtype)
    operands = draw_operands(name, n, arithmetic, DEVICE, rng)
    operands = operands.map(lambda tensor: ternary(tuple(tensor.shape), rng).to(tensor))
    operands.scalars = [2.0 for _ in operands.scalars]
    problem = Problem(name, arithmetic, x, weight, operands)
    acc = x.double() @ weight.double().mT
    assert float(acc.abs().max()) <= 256
    bounded = reference.after_epilogue(
        name, reference.Bounded(acc, torch.zeros_like(acc)), operands, arithmetic
    )
    for family, tile in KERNELS:
        actual = problem.run_fused(plans.numbers(family, tile, swizzle=2))
        assert actual is not None
        reference.assert_within(actual, bounded)
        if torch.equal(bounded.expected, (bounded.expected * 2).round() / 2):
            assert torch.equal(actual, bounded.expected.to(arithmetic.dtype))


def test_plans_that_do_not_exist_are_refused(rng: torch.Generator) -> None:
    problem = make("bias", BF16, (256, 256, 128), DEVICE, rng)
    for family in (plans.TMA, plans.SWAP_AB):
        for plan, words in (
            (plans.numbers(family, plans.tile_count(family, "16_bits")), "plan: tile must be in 0.."),
            (plans.numbers(family, -1), "plan: tile must be in 0.."),
            (plans.numbers(family, raster=2), "plan: raster must be 0"),
            (plans.numbers(family, swizzle=0), "plan: swizzle must be in 1..8, got 0"),
            (plans.numbers(family, swizzle=9), "plan: swizzle must be in 1..8, got 9"),
            (plans.numbers(family, splits=0), "plan: splits must be 1, 2, 4 or 8, got 0"),
            (plans.numbers(plans.FP16X3), "does not multiply in this arithmetic"),
            ([-2, 0, 0, 1, 1], "plan: family must be in 0.."),
            ([len(plans.FAMILIES), 0, 0, 1, 1], "plan: family must be in 0.."),
            (plans.numbers(family)[:4], "plan: got"),
            ([*plans.numbers(family), 1], "plan: got"),
            ([0], "plan: got"),
        ):
            with pytest.raises(RuntimeError, match=re.escape(words)):
                problem.run_fused(plan)


@pytest.mark.parametrize("arithmetic", [FP32, FP64], ids=lambda a: a.name)
def test_uncovered_arithmetics_decline(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    for name in LINEAR:
        problem = make(name, arithmetic, (1024, 1024, 1024), DEVICE, rng)
        assert problem.run_fused() is None
        plan = explained(problem)
        assert plan["fused"] is False and plan["why_not"]


NOT_COPIED = [
    *((TF32, layout) for layout in ("misaligned", "odd_rows", "transposed", "every_second_column")),
    (BF16, "every_second_column"),
    (FP16, "every_second_column"),
]
"""Layouts that no kernel addresses, and that no copy mends (test_copies_gpu.py)."""


@pytest.mark.parametrize(
    ("arithmetic", "layout"), NOT_COPIED, ids=lambda value: getattr(value, "name", value)
)
def test_uncovered_layouts_decline_and_say_why(
    arithmetic: Arithmetic, layout: str, rng: torch.Generator
) -> None:
    for name in LINEAR:
        for operand in ("x", "weight"):
            problem = make(
                name,
                arithmetic,
                (1024, 1024, 1024),
                DEVICE,
                rng,
                x_layout=LAYOUTS[layout if operand == "x" else "contiguous"],
                weight_layout=LAYOUTS[layout if operand == "weight" else "contiguous"],
            )
            assert problem.run_fused() is None, (name, operand)
            plan = explained(problem)
            assert plan["fused"] is False and plan["why_not"], (name, operand)
            problem.check(problem.run(), second_path=True)


@pytest.mark.parametrize("shape", [(512, 512, 65), (512, 499, 64), (1, 10, 64)], ids=str)
def test_odd_extents_decline_whatever_the_row_stride(
    shape: tuple[int, int, int], rng: torch.Generator
) -> None:
    """In TF32, which has no copies: K and N themselves must be whole units of 16 bytes."""
    rows = LAYOUTS["aligned_rows"]
    for name in LINEAR:
        problem = make(name, TF32, shape, DEVICE, rng, x_layout=rows, weight_layout=rows)
        assert problem.run_fused() is None, name
        problem.check(problem.run(), second_path=True)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(rng: torch.Generator) -> None:
    """Row offsets of x beyond 32 bits."""
    m, n, k = 140_000, 256, 16_384
    x = torch.randn(m, k, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE)
    out = poisoned((m, n), torch.bfloat16, DEVICE)
    plan = plans.numbers(plans.TMA, 4, raster=1)
    products.forced_into(out, "bias_relu", x, weight, "ieee", plan=plan)
    rows = torch.tensor([0, 1, 131_070, 131_071, 131_072, 139_999], device=DEVICE)
    expected = torch.relu(x[rows].double() @ weight.double().t())
    torch.testing.assert_close(out[rows].double(), expected, rtol=2**-8, atol=1e-2)
    assert not out.isnan().any()


@epilogues
@arithmetics
def test_explain_says_fused_exactly_when_the_call_fuses(
    name: str, arithmetic: Arithmetic, rng: torch.Generator
) -> None:
    shapes = [(8192, 4096, 1024), (1, 8, 8), (16, 4096, 1024), (127, 128, 72), (64, 129, 64), (64, 128, 63)]
    fused = []
    for shape in [*shapes, *EMPTY_SHAPES]:
        problem = make(name, arithmetic, shape, DEVICE, rng)
        plan = explained(problem)
        launched = problem.run_fused() is not None
        assert plan["fused"] is launched, (shape, plan["why_not"])
        assert bool(plan["why_not"]) is not launched
        fused.append(launched)
    # A bias, and a ReLU behind it, PyTorch's GEMM adds too, and where both are as fast it keeps the call.
    assert fused[0] or name in ("bias", "bias_relu"), "a large aligned problem must fuse"


def test_large_problem_fuses_and_is_right(rng: torch.Generator) -> None:
    for arithmetic in (FP16, BF16, TF32):
        problem = make("relu_div", arithmetic, (4096, 4096, 1024), DEVICE, rng)
        actual = problem.run_fused()
        assert actual is not None
        problem.check(actual, second_path=False)


def test_out_frame_is_left_alone(rng: torch.Generator) -> None:
    """TMA stores are clipped at the edge of the output, not of its tile."""
    for arithmetic in FUSED_ARITHMETICS:
        problem = make("bias", arithmetic, (130, 136, 64), DEVICE, rng)
        for family, tile in KERNELS:
            frame = torch.full((300, 512), 5.0, dtype=arithmetic.dtype, device=DEVICE)
            out = frame[8:138, 16:152]
            out.fill_(float("nan"))
            products.forced_into(
                out, "bias", problem.x, problem.weight, arithmetic.schema_arithmetic,
                bias=problem.operands.bias, plan=plans.numbers(family, tile),
            )  # fmt: skip
            problem.check(out, second_path=False)
            out.fill_(5.0)
            assert bool((frame == 5.0).all())


def test_leading_dimensions_fuse_without_copies(rng: torch.Generator) -> None:
    operands = draw_operands("bias", 256, BF16, DEVICE, rng)
    weight = signed((256, 128), rng).to(DEVICE, torch.bfloat16)
    x = signed((4, 64, 128), rng).to(DEVICE, torch.bfloat16)
    problem = Problem("bias", BF16, x, weight, operands)
    run_plan(problem, LARGE)
    torch.cuda.synchronize()
    out = poisoned((4, 64, 256), torch.bfloat16, DEVICE)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    products.forced_into(out, "bias", x, weight, "ieee", bias=operands.bias, plan=LARGE)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 1, "at most a workspace"
