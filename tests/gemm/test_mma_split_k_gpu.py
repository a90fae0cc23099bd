"""CTAs that share the K of an mma.sync kernel's tile, with forced plans: no call on Hopper has such a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gradings import products
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, SPLIT_ARITHMETICS, TF32, Arithmetic
from tests.support.cases import LINEAR, mma_unavailable
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, make, ternary
from tests.support.split import make_pack
from tests.support.watching import poisoned_memory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
cuda: Any = torch.cuda
FEW_ROWS, BY_ELEMENTS = 7, (8, 9)  # csrc/gemm/sm80_mma/tiles.h
SPLITS = (2, 4, 8)
TILES = {
    arithmetic: [
        tile
        for tile in range(
            plans.tile_count(plans.MMA, "16_bits" if arithmetic in (FP16, BF16) else arithmetic.name)
        )
        if tile not in BY_ELEMENTS
    ]
    for arithmetic in (FP16, BF16, TF32, *SPLIT_ARITHMETICS)
}
"""Those that may divide K."""
EVERY = [(arithmetic, tile) for arithmetic, tiles in TILES.items() for tile in tiles]
tiles = pytest.mark.parametrize(
    ("arithmetic", "tile"), EVERY, ids=lambda value: getattr(value, "name", str(value))
)
arithmetics = pytest.mark.parametrize("arithmetic", TILES, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def every_tile_runs() -> None:
    if reason := mma_unavailable():
        pytest.skip(f"gpu: {reason}")


def forced(problem: Problem, tile: int, splits: int, swizzle: int = 1, **given: Any) -> Callable[[], Tensor]:
    """A call with that plan, into the same result each time."""
    out = given.pop("out", None)
    out = problem.out() if out is None else out
    is_fp32 = problem.arithmetic.dtype == torch.float32
    return lambda: products.forced_into(
        out,
        problem.name,
        problem.x,
        problem.weight,
        problem.arithmetic.name if is_fp32 else "ieee",
        bias=problem.operands.bias,
        operands=problem.operands.tensors,
        scalars=problem.operands.scalars,
        plan=plans.numbers(plans.MMA, tile, swizzle % 2, swizzle, splits),
        **given,
    )


def run(problem: Problem, tile: int, splits: int, swizzle: int = 1, **given: Any) -> Tensor:
    """The result; it and the workspace, with the counters in it, hold NaN before."""
    with poisoned_memory():
        return forced(problem, tile, splits, swizzle, **given)()


def run_checked(problem: Problem, tile: int, splits: int, swizzle: int = 1) -> Tensor:
    """The same held against float64, twice: the bits must not depend on which CTA of a tile comes last."""
    found = run(problem, tile, splits, swizzle)
    problem.check(found, second_path=False)
    assert torch.equal(run(problem, tile, splits, swizzle), found)
    return found


@pytest.mark.parametrize("name", LINEAR)
@tiles
def test_every_split(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Tiles that are not full along M and N."""
    for shape, splits in (
        ((17, 264, 1024), 2),
        ((129, 136, 1160), 4),
        ((300, 520, 520), 8),
        ((1, 72, 2048), 4),
    ):
        run_checked(make(name, arithmetic, shape, DEVICE, rng), tile, splits, splits // 2)


@tiles
@pytest.mark.parametrize("splits", SPLITS)
def test_lengths_of_k(splits: int, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Shares of one stage, the last of which ends within it; equal shares; some a stage longer than others."""
    short = 64 * (splits - 1) + 8
    odd = [short + 1, 201 * splits] if arithmetic in SPLIT_ARITHMETICS else []
    for k in (short, 64 * splits, 64 * splits + 40, 200 * splits + 8, 2000, *odd):
        run_checked(make("bias", arithmetic, (70, 136, k), DEVICE, rng), tile, splits)


@tiles
def test_whole_numbers_have_the_bits_of_one_share(
    arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    """Where every sum is exact, it does not matter how K is divided."""
    problem = make("bias_gelu", arithmetic, (130, 264, 1032), DEVICE, rng)
    problem.x, problem.weight = (ternary(each.shape, rng).to(each) for each in (problem.x, problem.weight))
    whole = run(problem, tile, 1)
    for splits in SPLITS:
        for swizzle in (1, 2):
            assert torch.equal(run(problem, tile, splits, swizzle), whole)


@tiles
def test_a_row_does_not_depend_on_the_others(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    whole = make("bias_gelu", arithmetic, (300, 264, 1032), DEVICE, rng)
    every = run_checked(whole, tile, 4)
    for rows in (1, 17, 128):
        part = Problem(whole.name, arithmetic, whole.x[:rows], whole.weight, whole.operands)
        assert torch.equal(run(part, tile, 4), every[:rows])


@arithmetics
def test_the_same_bits_at_every_call(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Of more CTAs than run at once, which end in any order."""
    problem = make("bias", arithmetic, (260, 4096, 4104), DEVICE, rng)
    for tile in TILES[arithmetic]:
        first = run_checked(problem, tile, 4)
        for _ in range(10):
            assert torch.equal(run(problem, tile, 4), first)


@arithmetics
def test_padded_rows(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Rows with gaps of x, the weight and the result, whose gaps are left alone."""
    problem = make(
        "bias_relu",
        arithmetic,
        (130, 264, 520),
        DEVICE,
        rng,
        x_layout=LAYOUTS["padded_rows"],
        weight_layout=LAYOUTS["padded_rows"],
    )
    memory = torch.full((130, 280), 7.0, dtype=arithmetic.dtype, device=DEVICE)
    for tile in TILES[arithmetic]:
        memory.fill_(7.0)
        problem.check(run(problem, tile, 4, out=memory[:, :264]), second_path=False)
        assert (memory[:, 264:] == 7.0).all()


@pytest.mark.parametrize("arithmetic", SPLIT_ARITHMETICS, ids=lambda each: each.name)
def test_a_kept_pack_changes_nothing(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """The sums lie behind what slices take of the workspace, with and without those of the weight."""
    problem = make("bias", arithmetic, (300, 264, 777), DEVICE, rng)
    for tile in TILES[arithmetic]:
        assert torch.equal(run_checked(problem, tile, 4), run(problem, tile, 4, pack=make_pack(problem)))


@arithmetics
def test_a_graph_follows_its_inputs(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """The counters are cleared at every replay."""
    problem = make("bias", arithmetic, (100, 264, 1032), DEVICE, rng)
    for tile in TILES[arithmetic]:
        out = problem.out()
        call = forced(problem, tile, 4, out=out)
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        for scale in (1.0, -0.5, 2.0):
            problem.x.mul_(scale)
            out.fill_(5.5)
            graph.replay()
            assert torch.equal(out, run(problem, tile, 4))
            problem.check(out, second_path=False)


@arithmetics
def test_two_streams_at_once(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Each call has its own workspace."""
    both = [make("bias_relu", arithmetic, (64, 1032, 2056), DEVICE, rng) for _ in range(2)]
    streams = [cuda.Stream() for _ in both]
    tile = TILES[arithmetic][-1]
    wanted = [run_checked(problem, tile, 4) for problem in both]
    for _ in range(20):
        found = []
        cuda.synchronize()
        for problem, stream in zip(both, streams, strict=True):
            with cuda.stream(stream):
                found.append(forced(problem, tile, 4)())
        cuda.synchronize()
        for each, expected in zip(found, wanted, strict=True):
            assert torch.equal(each, expected)


@pytest.mark.parametrize("splits", SPLITS)
def test_special_values_stay_in_their_row(splits: int, rng: torch.Generator) -> None:
    """In whichever share of K they are."""
    problem = make("bias", BF16, (70, 264, 1032), DEVICE, rng)
    clean = problem.x.clone()
    problem.x[3, 5], problem.x[69, 1031] = float("nan"), float("inf")
    spoiled = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    spoiled[[3, 69]] = True
    for tile in TILES[BF16]:
        found = run(problem, tile, splits)
        expected = run(Problem("bias", BF16, clean, problem.weight, problem.operands), tile, splits)
        assert torch.equal(found[~spoiled], expected[~spoiled])
        assert found[3].isnan().all() and not found[69].isfinite().any()


def test_eight_shares_of_few_rows(rng: torch.Generator) -> None:
    """For which calls on other GPUs would have this plan."""
    for arithmetic in (FP16, BF16):
        for m in (1, 7, 16):
            run_checked(make("bias_gelu", arithmetic, (m, 1032, 4104), DEVICE, rng), FEW_ROWS, 8)


def test_plans_that_cannot_be_are_refused(rng: torch.Generator) -> None:
    problem = make("bias", BF16, (64, 72, 128), DEVICE, rng)
    with pytest.raises(RuntimeError, match="plan: K is too short for 8 splits"):
        run(problem, 4, 8)
    with pytest.raises(RuntimeError, match="plan: splits must be 1 for a tile that loads by elements, got 2"):
        run(problem, BY_ELEMENTS[0], 2)
