"""fp32 by the mma.sync kernels on fp16 slices, with forced plans: no call chooses them on Hopper.

Split, packs and the fixup's arithmetic are those of Hopper's kernels, which have tests of their own. Here are the
mainloops, the rescaling, and the fixup behind them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.gradings import bounds, data, products, sweep
from benchmarks.gradings.measures import Exact, errors
from benchmarks.gradings.products import SCALED, SPLIT, Product
from tests.support import exact, plans, special
from tests.support.arithmetic import SPLIT_ARITHMETICS, Arithmetic
from tests.support.cases import LINEAR, mma_unavailable
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, make
from tests.support.split import beyond_slices, check_frame, check_integers, make_pack, run, run_checked

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
cuda: Any = torch.cuda
SIZE = (sweep.ROWS, sweep.COLUMNS)
DENSE = ["uniform_linear", "normal", "positive", "rows_8", "rows_30", "rows_60"]
EVERY = [(each, tile) for each in SPLIT_ARITHMETICS for tile in range(plans.tile_count(plans.MMA, each.name))]
OF_SPLIT = range(plans.tile_count(plans.MMA, SPLIT))

epilogues = pytest.mark.parametrize("name", LINEAR)
arithmetics = pytest.mark.parametrize("arithmetic", SPLIT_ARITHMETICS, ids=lambda each: each.name)
tiles = pytest.mark.parametrize(
    ("arithmetic", "tile"), EVERY, ids=lambda value: getattr(value, "name", str(value))
)


@pytest.fixture(autouse=True)
def every_tile_runs() -> None:
    if reason := mma_unavailable():
        pytest.skip(f"gpu: {reason}")


def plan(tile: int = 0, raster: int = 0, swizzle: int = 1) -> list[int]:
    return plans.numbers(plans.MMA, tile, raster, swizzle)


def forced(arithmetic: str, tile: int) -> Product:
    return products.forced(arithmetic, plan(tile))


def bound(arithmetic: str, k: int) -> float:
    return bounds.split(k) if arithmetic == SPLIT else bounds.scaled(k)


@epilogues
@tiles
def test_every_tile(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Whole tiles, their edges in M, N and K, a single element."""
    shapes = [(384, 512, 256), (129, 264, 136), (1, 4, 1), (33, 60, 77), (200, 1032, 65), (257, 132, 1031)]
    for shape in shapes:
        for swizzle in (1, 4):
            run_checked(make(name, arithmetic, shape, DEVICE, rng), plan(tile, swizzle % 2, swizzle))


@tiles
def test_lengths_of_k(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Fewer stages than the ring has, as many, and more; blocks of 512, and the parts behind them."""
    for k in (1, 31, 32, 33, 63, 64, 65, 96, 128, 129, 160, 480, 511, 512, 513, 544, 1024, 1500, 4097):
        run_checked(make("bias", arithmetic, (130, 136, k), DEVICE, rng), plan(tile))


@tiles
def test_every_raster_and_swizzle(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    problem = make("bias_gelu", arithmetic, (700, 1160, 200), DEVICE, rng)
    first = run_checked(problem, plan(tile))
    for raster in (0, 1):
        for swizzle in (1, 2, 4, 8):
            assert torch.equal(run(problem, plan(tile, raster, swizzle)), first)


@tiles
def test_a_row_does_not_depend_on_the_others(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    whole = make("bias_gelu", arithmetic, (300, 264, 520), DEVICE, rng)
    every = run_checked(whole, plan(tile))
    for rows in (1, 17, 128):
        part = Problem(whole.name, arithmetic, whole.x[:rows], whole.weight, whole.operands)
        assert torch.equal(run(part, plan(tile)), every[:rows])


@arithmetics
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(arithmetic: Arithmetic, layout: str, rng: torch.Generator) -> None:
    problem = make("bias_relu", arithmetic, (130, 200, 257), DEVICE, rng)
    expected = run_checked(problem, plan())
    x, weight = problem.x, problem.weight
    for problem.x, problem.weight in ((LAYOUTS[layout](x), weight), (x, LAYOUTS[layout](weight))):
        assert torch.equal(run(problem, plan()), expected)


@tiles
def test_a_kept_pack_changes_nothing(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    for shape in ((300, 264, 136), (5, 12, 33)):
        problem = make("bias", arithmetic, shape, DEVICE, rng)
        assert torch.equal(
            run_checked(problem, plan(tile), pack=make_pack(problem)), run(problem, plan(tile))
        )


@epilogues
@tiles
def test_integers_in_every_epilogue(
    name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    check_integers(name, arithmetic, plan(tile, swizzle=2), rng)


@tiles
def test_out_frame_is_left_alone(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    check_frame(arithmetic, plan(tile), rng)


@epilogues
@tiles
def test_repaired_results_get_the_epilogue_too(
    name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    """Non-finite elements, and rows whose range the slices cannot hold."""
    run_checked(beyond_slices(name, arithmetic, rng), plan(tile))


@pytest.mark.parametrize("tile", OF_SPLIT)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("k", [128, 512, 1024, 4096, 16384, 32768])
def test_the_split_is_no_less_accurate_than_sgemm(name: str, k: int, tile: int) -> None:
    found = {products.SGEMM: products.sgemm, SPLIT: forced(SPLIT, tile)}
    point = sweep.grade(found, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
    assert point.as_accurate(SPLIT), (point.times_baseline(SPLIT), point.errors)
    assert point.errors[SPLIT].blas < 1


@tiles
@pytest.mark.parametrize("name", [each.name for each in (*data.CLASSES, *data.EXTREME)])
def test_every_class_keeps_the_derived_bound(name: str, arithmetic: Arithmetic, tile: int) -> None:
    for k in (16, 256, 4096):
        x, weight = data.BY_NAME[name].make(*SIZE, k, 0, DEVICE)
        found = errors(forced(arithmetic.name, tile)(x, weight), Exact.of(x, weight))
        assert found.max_ratio <= bound(arithmetic.name, k) / bounds.EPS, (k, found)


@pytest.mark.parametrize("tile", range(plans.tile_count(plans.MMA, SCALED)))
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_the_scaled_product_is_no_less_accurate_than_tf32(name: str, k: int, tile: int) -> None:
    found = {products.TF32: products.tf32, SCALED: forced(SCALED, tile)}
    point = sweep.grade(found, data.BY_NAME[name], k, 1, DEVICE)
    assert point.as_accurate(SCALED), (point.times_baseline(SCALED), point.errors)


@tiles
def test_gradings(arithmetic: Arithmetic, tile: int) -> None:
    """Whole numbers, and Demmel's: exact zeros and the circulant test up to 2^+-50."""
    product = forced(arithmetic.name, tile)
    verdicts = [*exact.integer_verdicts(product, DEVICE), *exact.demmel_verdicts(product, DEVICE)]
    if arithmetic.name == SPLIT:
        verdicts += exact.representation_verdicts(product, DEVICE)
    for verdict in verdicts:
        assert verdict.ok, verdict


@tiles
def test_special_values(arithmetic: Arithmetic, tile: int) -> None:
    relative = special.EXACT_ENOUGH if arithmetic.name == SPLIT else bounds.scaled(special.K)
    for verdict in special.special_verdicts(forced(arithmetic.name, tile), DEVICE, relative):
        assert verdict.ok, verdict


@tiles
def test_a_power_of_two_scales_the_result_exactly(arithmetic: Arithmetic, tile: int) -> None:
    x, weight = data.BY_NAME["uniform_linear"].make(*SIZE, 2048, 0, DEVICE)
    exponents = data.Draw.seeded(1, DEVICE).exponents(SIZE[0], 1, 40)
    product = forced(arithmetic.name, tile)
    assert torch.equal(product(torch.ldexp(x, exponents), weight), torch.ldexp(product(x, weight), exponents))


@arithmetics
def test_a_graph_follows_its_inputs(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Also to numbers that need the fixup: nothing about the data is decided at the capture."""
    problem = make("bias", arithmetic, (256, 264, 256), DEVICE, rng)
    ordinary, out = problem.x.clone(), problem.out()

    def call() -> torch.Tensor:
        return products.forced_into(
            out, "bias", problem.x, problem.weight, arithmetic.name, bias=problem.operands.bias, plan=plan()
        )

    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        call()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        call()
    for value in (1.0, math.inf, math.nan, 2.0):
        problem.x.copy_(ordinary)
        problem.x[17, 9] = value
        out.fill_(5.5)
        graph.replay()
        problem.check(out, second_path=False)


def test_plans_that_do_not_exist_are_refused(rng: torch.Generator) -> None:
    for arithmetic in SPLIT_ARITHMETICS:
        problem = make("bias", arithmetic, (64, 64, 128), DEVICE, rng)
        count = plans.tile_count(plans.MMA, arithmetic.name)
        with pytest.raises(RuntimeError, match="plan: tile must be in"):
            run(problem, plan(count))
        with pytest.raises(RuntimeError, match="plan: K is too short for 8 splits"):
            run(problem, plans.numbers(plans.MMA, splits=8))
