"""The kernels on fp16 slices themselves: every epilogue and tile, layouts, packs, graphs, streams, determinism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import epigemm
from benchmarks.gradings import products
from epigemm._native import ops
from epigemm.packs.weight_packs import SLICES, pack_bytes
from tests.support import plans
from tests.support.arithmetic import SCALED, SPLIT_ARITHMETICS, Arithmetic
from tests.support.cases import LINEAR, has_bias, signed
from tests.support.layouts import LAYOUTS
from tests.support.problems import EMPTY_SHAPES, make
from tests.support.public import PUBLIC_LINEAR, Public, map_tensors
from tests.support.split import (
    beyond_slices,
    check_frame,
    check_integers,
    check_public,
    every_tile,
    make_pack,
    plan,
    run,
    run_checked,
    tile_count,
)
from tests.support.watching import POISON

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
SWIZZLES = [1, 2, 4, 8]
cuda: Any = torch.cuda

epilogues = pytest.mark.parametrize("name", LINEAR)
arithmetics = pytest.mark.parametrize("arithmetic", SPLIT_ARITHMETICS, ids=lambda a: a.name)
tiles = pytest.mark.parametrize(
    ("arithmetic", "tile"), every_tile(), ids=lambda value: getattr(value, "name", str(value))
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons in which a NaN equals itself."""
    return tensor.view(torch.int32)


def test_tiles_are_built() -> None:
    for arithmetic in SPLIT_ARITHMETICS:
        assert tile_count(arithmetic) > 0, arithmetic.name


@epilogues
@tiles
def test_every_tile(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Whole tiles, their edges in M, N and K, a single element; N in whole 16 bytes, K as it comes."""
    shapes = [
        (384, 512, 256),
        (129, 264, 136),
        (1, 4, 1),
        (1, 8, 8),
        (33, 60, 77),
        (200, 1032, 65),
        (257, 132, 1031),
    ]
    for shape in shapes:
        for swizzle in (1, 4):
            run_checked(make(name, arithmetic, shape, DEVICE, rng), plan(tile, swizzle % 2, swizzle))


@tiles
def test_every_raster_and_swizzle(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Which tile is computed when must not matter: the same bits for every order."""
    for name in LINEAR:
        problem = make(name, arithmetic, (700, 1160, 200), DEVICE, rng)
        first = run_checked(problem, plan(tile))
        for raster in (0, 1):
            for swizzle in SWIZZLES:
                assert torch.equal(run(problem, plan(tile, raster, swizzle)), first)


@epilogues
@tiles
def test_long_sums(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Many stages, and a K that ends within one."""
    for k in (4096, 4097, 5000):
        run_checked(make(name, arithmetic, (130, 136, k), DEVICE, rng), plan(tile))


@epilogues
@arithmetics
def test_the_dispatched_plan(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """No plan given: the planner's own, from few rows to many."""
    for shape in [(16, 512, 1024), (33, 512, 1024), (64, 1024, 512), (1024, 1024, 1024), (3000, 260, 520)]:
        problem = make(name, arithmetic, shape, DEVICE, rng)
        run_checked(problem, [])


@arithmetics
def test_plans_that_do_not_exist_are_refused(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    problem = make("bias", arithmetic, (256, 256, 128), DEVICE, rng)
    wrong = [
        plan(tile_count(arithmetic)),
        plan(-1),
        plan(raster=2),
        plan(swizzle=0),
        plan(swizzle=9),
        plans.numbers(plans.FP16X3, splits=2),
        plans.numbers(plans.FP16X3, splits=3),
        plans.numbers(plans.TMA),
        plans.numbers(plans.SWAP_AB),
        [-2, 0, 0, 1, 1],
        [len(plans.FAMILIES), 0, 0, 1, 1],
        plan()[:4],
        plan()[1:4],
        [*plan(), 1],
        [0],
    ]
    for numbers in wrong:
        out = problem.out()
        with pytest.raises(RuntimeError, match="plan"):
            run(problem, numbers, out=out)
        assert bool(out.isnan().all())
    for splits in (2, 4, 8):
        with pytest.raises(RuntimeError, match=f"plan: splits must be 1 on fp16 slices, got {splits}"):
            run(problem, plans.numbers(plans.FP16X3, splits=splits), out=problem.out())


@arithmetics
def test_what_does_not_fit_is_refused(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Outputs that no kernel can store to: before anything is written."""
    problem = make("bias", arithmetic, (64, 64, 64), DEVICE, rng, with_bias=False)
    frame = torch.full((64, 65), math.nan, device=DEVICE)
    refused = [
        frame[:, :64],
        frame.flatten()[1:].narrow(0, 0, 4096).view(64, 64),
        problem.out()[:32],
        problem.out().half(),
    ]
    for out in refused:
        with pytest.raises(RuntimeError, match=r"NOT_STORABLE|DOES_NOT_FIT"):
            run(problem, plan(), out=out)
        assert bool(out.isnan().all())


@arithmetics
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("operand", ["x", "weight"])
def test_any_strides(arithmetic: Arithmetic, layout: str, operand: str, rng: torch.Generator) -> None:
    """The split reads whatever layout: the bits are those of the contiguous operand."""
    for name in LINEAR:
        for shape in ((136, 72, 65), (130, 200, 256)):
            problem = make(name, arithmetic, shape, DEVICE, rng)
            values = getattr(problem, operand)
            if layout == "expanded":
                changed = values[:1].expand(values.shape)
                setattr(problem, operand, changed.contiguous())
            else:
                changed = LAYOUTS[layout](values)
            expected = run_checked(problem, plan())
            setattr(problem, operand, changed)
            assert torch.equal(run(problem, plan()), expected)


@arithmetics
def test_overlapping_rows(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """x as overlapping windows of one vector, a transposed weight: strides that no copy made."""
    series = signed((1000,), rng).to(DEVICE, torch.float32)
    windows = series.unfold(0, 200, 3)
    problem = make("bias_relu", arithmetic, (windows.shape[0], 64, 200), DEVICE, rng)
    problem.x = windows
    run_checked(problem, plan())


@epilogues
@tiles
def test_a_kept_pack_changes_nothing(
    name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    for shape in ((300, 264, 136), (5, 12, 33)):
        problem = make(name, arithmetic, shape, DEVICE, rng)
        pack = make_pack(problem)
        kept = pack.clone()
        assert torch.equal(run_checked(problem, plan(tile), pack=pack), run(problem, plan(tile)))
        assert torch.equal(pack, kept), "the pack was written to"


@arithmetics
def test_packs_and_workspaces_need_no_clean_memory(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """K = 77 leaves padding columns, which the split must write as zeros over whatever was there."""
    problem = make("bias", arithmetic, (40, 36, 77), DEVICE, rng)
    pieces = SLICES[arithmetic.name]
    size = pack_bytes(36, 77, pieces)
    packs = [torch.full((size,), byte, dtype=torch.uint8, device=DEVICE) for byte in (0, POISON)]
    for pack in packs:
        ops._split_rows_out(problem.weight, pieces, pack)
    results = [run(problem, plan(), pack=pack) for pack in packs]
    assert torch.equal(results[0], results[1])


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
            for tile in range(tile_count(arithmetic)):
                run_checked(problem, plan(tile))


@epilogues
@arithmetics
def test_vectors_need_no_alignment(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    for tile in range(tile_count(arithmetic)):
        problem = make(name, arithmetic, (256, 256, 128), DEVICE, rng)
        problem.operands = problem.operands.map(LAYOUTS["misaligned"])
        run_checked(problem, plan(tile))


@epilogues
@tiles
def test_integers_are_exact(name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    check_integers(name, arithmetic, plan(tile, swizzle=2), rng)


@tiles
def test_out_frame_is_left_alone(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    """Stores, and those of the repair, are clipped at the edge of the output, not of its tile."""
    check_frame(arithmetic, plan(tile), rng)


@epilogues
@tiles
def test_repaired_tiles_get_the_epilogue_too(
    name: str, arithmetic: Arithmetic, tile: int, rng: torch.Generator
) -> None:
    """Non-finite elements, and rows whose range the pieces cannot hold, in every epilogue."""
    run_checked(beyond_slices(name, arithmetic, rng), plan(tile))


ODD_SHAPES = [
    (7, 5, 9),
    (1, 1, 1),
    (129, 131, 127),
    (1023, 1025, 1027),
    (2048, 2047, 2049),
    (2048, 4096, 4095),
    *EMPTY_SHAPES,
]


@arithmetics
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_public_results_at_any_size(
    arithmetic: Arithmetic, shape: tuple[int, int, int], rng: torch.Generator
) -> None:
    """Odd M, N and K, and nothing at all, by whichever kernel the planner chooses."""
    for name in LINEAR:
        problem = make(name, arithmetic, shape, DEVICE, rng)
        check_public(problem, problem.run())


@arithmetics
@pytest.mark.parametrize("layout", LAYOUTS)
def test_public_results_in_any_layout(arithmetic: Arithmetic, layout: str, rng: torch.Generator) -> None:
    change = LAYOUTS[layout]
    for name in LINEAR:
        problem = make(
            name, arithmetic, (1024, 2048, 2048), DEVICE, rng, x_layout=change, weight_layout=change
        )
        check_public(problem, problem.run())


LARGE = (1024, 4096, 4096)  # dispatch takes the kernels here


def drawn(function: Public, rng: torch.Generator, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = function.draw(rng, shape=LARGE, device="cuda")
    return arguments, {"precision": precision}


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_graphs_follow_their_inputs(function: Public, precision: str, rng: torch.Generator) -> None:
    """Captured with ordinary numbers, replayed with others: also with infinities and rows beyond the pieces' range.

    Nothing about the data may have been decided at capture.
    """
    arguments, options = drawn(function, rng, precision)
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function.call(**arguments, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function.call(**arguments, **options)
    ordinary = arguments["x"].clone()
    for change in ("none", "other", "infinite", "nan", "range", "none"):
        x = ordinary * 3 - 1 if change == "other" else ordinary.clone()
        if change == "infinite":
            x[17, 9] = math.inf
        if change == "nan":
            x[-1, -1] = math.nan
        if change == "range":
            x[500] *= 2.0**-40
            x[500, 3] = 2.0**10
        arguments["x"].copy_(x)
        captured.fill_(5.5)
        graph.replay()
        expected = function.call(**(arguments | {"x": x}), **options)
        assert torch.equal(bits(captured), bits(expected)), change
    assert bool(captured.isfinite().all())


@arithmetics
def test_the_kernels_are_capturable(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """The native operators by themselves: split of the weight, split of x, product and repair in one graph."""
    problem = make("bias_relu", arithmetic, (300, 264, 200), DEVICE, rng)
    expected, out = run(problem, plan()), problem.out()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.forced_into(
            out,
            "bias_relu",
            problem.x,
            problem.weight,
            arithmetic.name,
            bias=problem.operands.bias,
            plan=plan(),
        )
    graph.replay()
    assert torch.equal(out, expected)
    problem.weight[3, 3] = math.inf
    graph.replay()
    problem.check(out, second_path=False)


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_streams_side_by_side(function: Public, precision: str, rng: torch.Generator) -> None:
    """Calls on several streams at once share no scratch memory, not even where a pack is kept."""
    arguments, options = drawn(function, rng, precision)
    inputs = [arguments["x"] * factor for factor in (1.0, -0.5, 3.0, 0.125)]
    expected = [function.call(**(arguments | {"x": x}), **options) for x in inputs]
    torch.cuda.synchronize()
    streams = [cuda.Stream() for _ in inputs]
    for _ in range(5):
        results = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(function.call(**(arguments | {"x": x}), **options))
        torch.cuda.synchronize()
        assert all(torch.equal(mine, other) for mine, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_calls_follow_the_current_stream(function: Public, rng: torch.Generator) -> None:
    """Inputs written late on a side stream: a launch on any other stream would read the old values."""
    for precision in ("highest", "high"):
        late, options = drawn(function, rng, precision)
        expected = function.call(**late, **options)
        early = map_tensors(late, lambda tensor: torch.full_like(tensor, math.nan))
        stream = cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            cuda._sleep(200_000_000)
            for name, tensor in early.items():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(late[name])
            actual = function.call(**early, **options)
        stream.synchronize()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_calls_do_not_synchronise(function: Public, rng: torch.Generator) -> None:
    """The guard decides on the device."""
    for precision in ("highest", "high"):
        arguments, options = drawn(function, rng, precision)
        arguments["x"][3, 3] = math.inf
        function.call(**arguments, **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda._sleep(200_000_000)
            event = cuda.Event()
            event.record()
            function.call(**arguments, **options)
            assert not event.query(), "the call waited for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.parametrize("tile", [1, 2])
def test_the_repair_reads_the_facts_of_its_own_call(tile: int, rng: torch.Generator) -> None:
    """Pingpong tiles, few enough that the repair starts while the split of x runs, in a workspace of clean facts.

    The repair must not decide by what the call before has left there.
    """
    m, n, k, calls = 512, 512, 8192, 200
    if tile >= tile_count(SCALED):
        pytest.skip("gpu: no such tile is built")
    clean, weight = (signed((rows, k), rng, mixed=False).to(DEVICE, torch.float32) for rows in (m, n))
    spoiled, pack = clean.clone(), products.make_pack(weight, SCALED.name)
    spoiled[m // 2 + 5, k // 2 + 7] = math.nan
    expected = spoiled.isnan().any(1, keepdim=True).expand(m, n)
    out, wrong = torch.empty(m, n, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(calls):
        for x in (clean, spoiled):
            products.forced_into(out, "bias", x, weight, SCALED.name, plan=plan(tile), pack=pack)
        wrong += (out.isnan() != expected).sum()
    assert int(wrong) == 0


@tiles
def test_results_repeat_bit_for_bit(arithmetic: Arithmetic, tile: int, rng: torch.Generator) -> None:
    for name in LINEAR:
        problem = make(name, arithmetic, (1000, 1032, 2048), DEVICE, rng)
        first = run(problem, plan(tile))
        for _ in range(5):
            assert torch.equal(run(problem, plan(tile)), first)


def test_memory_does_not_grow(rng: torch.Generator) -> None:
    """A kept pack apart, a call leaves nothing behind: its workspace goes back to torch."""
    calls = [(function, *drawn(function, rng, p)) for function in PUBLIC_LINEAR for p in ("highest", "high")]
    for function, arguments, options in calls:
        function.call(**arguments, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        for function, arguments, options in calls:
            function.call(**arguments, **options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_ieee_never_takes_pieces(rng: torch.Generator) -> None:
    """`ieee` is torch's own product, bit for bit, even where `highest` takes the split."""
    x, weight = (signed((2048, 2048), rng, mixed=False).to(DEVICE, torch.float32) for _ in range(2))
    assert torch.equal(epigemm.linear(x, weight, precision="ieee"), products.sgemm(x, weight))
