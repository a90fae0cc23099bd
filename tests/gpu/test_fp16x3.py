"""Hopper's kernels of fp32 on fp16 slices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import bounds, data, products
from benchmarks.gradings.measures import Exact, errors
from tests.gpu.launching import (
    DEVICE,
    RAGGED,
    Kernel,
    Sizes,
    as_it_lies,
    both,
    captured,
    checked,
    every_tile,
    launch,
    two_of_every_kind,
)
from tests.gpu.properties import (
    Family,
    OfKernels,
    SecondValues,
    SharedRows,
    Statistics,
    Values,
    check_shared,
    check_statistics,
    gate_last,
    with_statistics,
)
from tests.gpu.slices import SIZE, OnSlices, PackedWeights, bound, product_of
from tests.gpu.test_tma import assert_special_statistics
from tests.support import plans, reference
from tests.support.arithmetic import SCALED, SPLIT, SPLIT_ARITHMETICS, Arithmetic
from tests.support.cases import signed
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, formula_of, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

arithmetics = pytest.mark.parametrize("arithmetic", SPLIT_ARITHMETICS, ids=lambda each: each.name)
KERNELS = every_tile(plans.FP16X3, SPLIT_ARITHMETICS)
AS_IT_LIES = as_it_lies(SPLIT_ARITHMETICS)
SHARING_K = as_it_lies(SPLIT_ARITHMETICS, splits=(2, 8))
GRADED = {
    each.name: [(name, 2048) for name in ("uniform_linear", "positive", "columns_30")]
    for each in SPLIT_ARITHMETICS
}


class TestFp16x3(Family, SharedRows, SecondValues, Statistics, OnSlices, PackedWeights):
    kernels = KERNELS
    sizes = (
        *((384, 512, 256), (129, 264, 136), (1, 4, 1), (1, 8, 8)),
        *((33, 60, 77), (200, 1032, 65), (257, 132, 1031)),
    )
    depths = (1, 33, 64, 77, 136, 1024, 4096, 4097, 5000)
    lying = tuple(LAYOUTS)
    graded: ClassVar = GRADED


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which a NaN equals itself."""
    return tensor.view(torch.int32)


class WrittenWeights(OfKernels):
    """Of kernels that remember something of a weight."""

    def test_a_weight_may_be_written_at_any_time(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Between calls and between replays of a graph, at the same address, whatever is remembered of it."""
        problem = make("bias", kernel.arithmetic, (130, 264, 520), rng)
        out, spare = problem.out(), problem.weight.clone()
        graph = captured(lambda: launch(problem, kernel, out=out))
        for factor in (1.0, 2.0**20, 2.0**-60, 2.0**90, 0.0, 1.0):
            problem.weight.copy_(spare * factor)
            graph.replay()
            problem.check(out)
            assert torch.equal(bits(launch(problem, kernel)), bits(out))
            problem.weight[::3] = spare[::3] * 2.0**-9
            checked(problem, kernel)
            other = replace(problem, weight=problem.weight.clone())
            assert torch.equal(bits(launch(other, kernel)), bits(launch(problem, kernel)))

    def test_a_capture_that_meets_a_weight_first(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, (64, 136, 520), rng)
        launch(problem, kernel)
        problem.weight = problem.weight.clone()
        out = problem.out()
        graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(problem, kernel, out=out)
        for factor in (1.0, 2.0**30, 2.0**-50):
            problem.weight *= factor
            graph.replay()
            problem.check(out)


class TestAsItLies(Family, SharedRows, SecondValues, Statistics, OnSlices, WrittenWeights):
    """The kernels that read an fp32 weight as it lies."""

    kernels = AS_IT_LIES
    sizes = (
        *((384, 512, 256), (129, 264, 136), (1, 4, 4), (1, 8, 8)),
        *((33, 60, 76), (200, 1032, 64), (640, 4100, 200), (257, 132, 1032)),
    )
    depths = (4, 32, 64, 76, 136, 1024, 4096, 4100, 5000)
    lying = ("padded_rows", "every_second_row")
    graded: ClassVar = GRADED


class TestSharingK(Values, SharedRows, WrittenWeights):
    """CTAs that share the K of a tile."""

    kernels = SHARING_K
    sizes = ((384, 512, 520), (129, 264, 600), (1, 4, 1024), (33, 60, 76), (640, 4100, 1032))
    depths = (76, 512, 520, 1024, 4096, 4100, 5000)

    def test_every_class_of_data_keeps_the_derived_bound(self, kernel: Kernel) -> None:
        for each in (*data.CLASSES, *data.EXTREME):
            x, weight = each.make(*SIZE, 4096, 0, DEVICE)
            found = errors(product_of(kernel)(x, weight), Exact.of(x, weight))
            assert found.max_ratio <= bound(kernel.arithmetic.name, 4096) / bounds.EPS, (each.name, found)

    def test_statistics_and_second_values(self, kernel: Kernel, rng: torch.Generator) -> None:
        check_statistics(make("bias", kernel.arithmetic, (300, 264, 1032), rng), kernel)
        problem = make(two_of_every_kind, kernel.arithmetic, (65, 264, 1032), rng)
        for place, found in enumerate(both(two_of_every_kind, problem, kernel)):
            reference.assert_within(found, problem.expected(formula_of(two_of_every_kind, place)))

    def test_a_part_without_a_stage_is_refused(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, (16, 64, 64), rng)
        with pytest.raises(RuntimeError, match="fewer stages"):
            launch(problem, kernel)


def test_more_weights_than_are_remembered(rng: torch.Generator) -> None:
    """The places are given away anew: 40 weights of 2^18 rows in 2^22 places."""
    kernel = AS_IT_LIES[0]
    problem = make("bias", kernel.arithmetic, (8, 2**18, 8), rng, with_bias=False)
    weights = [problem.weight * 2.0**shift for shift in range(-20, 20)]
    for _ in range(2):
        for problem.weight in weights:
            checked(problem, kernel)


def test_rows_that_tma_refuses_are_refused(rng: torch.Generator) -> None:
    problem = make("bias", SPLIT, (64, 64, 66), rng)
    with pytest.raises(RuntimeError, match="rows are not whole 16 bytes"):
        launch(problem, AS_IT_LIES[0])


def reject(problem: Problem, rows: tuple[int, ...]) -> None:
    """Have the range check reject rows of x, of which all elements but the last are too small for slices."""
    for row in rows:
        problem.x[row] *= 2.0**-40
        problem.x[row, -1] = 1.0
    problem.weight[::3, -1] = 0.0  # where only the small elements count


class TestBesideWhatIsComputedAgain:
    """The fixup computes the results of rejected rows again, and all that follows from them."""

    kernels = (*KERNELS, *AS_IT_LIES)

    @pytest.mark.parametrize("sizes", [(1000, 264, 256), (130, 72, 512), (129, 1032, 1024)], ids=str)
    def test_statistics(self, kernel: Kernel, sizes: Sizes, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, sizes, rng, with_bias=False)
        rejected = [0, 5, 63, 64, 127, 128]
        reject(problem, tuple(rejected))
        found = check_statistics(problem, kernel)[rejected][:, ::3].double()
        exact = problem.x[rejected].double() @ problem.weight[::3].double().t()
        assert float((found - exact).norm() / exact.norm()) < 2.0**-20, "nothing was computed again"

    def test_infinities_and_nans(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, (333, 264, 128), rng, with_bias=False)
        problem.x[7, 3], problem.x[70, 3], problem.weight[9, 5] = math.inf, -math.inf, math.nan
        assert_special_statistics(*with_statistics(problem, kernel))

    def test_second_values(self, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in [each for each in RAGGED if each[0] > 62 and each[2] > 8]:
            problem = make(two_of_every_kind, kernel.arithmetic, sizes, rng)
            reject(problem, (0, 5, 62))
            for place, found in enumerate(both(two_of_every_kind, problem, kernel)):
                reference.assert_within(found, problem.expected(formula_of(two_of_every_kind, place)))

    def test_shared_rows(self, kernel: Kernel, rng: torch.Generator) -> None:
        """With the same gates."""
        x, weight = signed((6, 50, 256), rng).to(DEVICE).float(), signed((136, 256), rng).to(DEVICE).float()
        x[2, 7, ::2] *= 2.0**-40
        x[2, 7, 1::2] *= 2.0**30
        x[5, 49, 3] = math.inf
        weight[5, 1::2] *= 2.0**-30
        bias, residual, gate = (
            signed(shape, rng).to(DEVICE).float() for shape in ((136,), (6, 50, 136), (6, 1, 136))
        )
        check_shared(gate_last, x, weight, [bias, residual, gate], kernel)


@pytest.mark.parametrize("tile", [1, 2])
def test_the_repair_reads_the_facts_of_its_own_call(tile: int, rng: torch.Generator) -> None:
    """Pingpong tiles, few enough that the repair starts while the split of x runs, in a workspace of clean facts.

    The repair must not decide by what the call before has left there.
    """
    m, n, k, calls = 512, 512, 8192, 200
    if tile >= plans.tile_count(plans.FP16X3, SCALED.name):
        pytest.skip("gpu: no such tile is built")
    clean, weight = (signed((rows, k), rng, mixed=False).to(DEVICE, torch.float32) for rows in (m, n))
    spoiled, pack = clean.clone(), products.make_pack(weight, SCALED.name)
    spoiled[m // 2 + 5, k // 2 + 7] = math.nan
    expected = spoiled.isnan().any(1, keepdim=True).expand(m, n)
    out, wrong = torch.empty(m, n, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    plan = plans.numbers(plans.FP16X3, tile)
    for _ in range(calls):
        for x in (clean, spoiled):
            products.forced_into(out, "bias", x, weight, SCALED.name, plan=plan, pack=pack)
        wrong += (out.isnan() != expected).sum()
    assert int(wrong) == 0


@arithmetics
def test_the_fastest_plan(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """No plan given: the planner's own, from few rows to many."""
    for sizes in [(16, 512, 1024), (33, 512, 1024), (64, 1024, 512), (1024, 1024, 1024), (3000, 260, 520)]:
        checked(make("bias_gelu", arithmetic, sizes, rng), [])


@arithmetics
def test_what_does_not_fit_is_refused(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Outputs that no kernel can store to: before anything is written."""
    problem = make("bias", arithmetic, (64, 64, 64), rng, with_bias=False)
    frame = torch.full((64, 65), math.nan, device=DEVICE)
    misaligned = frame.flatten()[1:].narrow(0, 0, 4096).view(64, 64)
    for out in (frame[:, :64], misaligned, problem.out()[:32], problem.out().half()):
        with pytest.raises(RuntimeError, match=r"NOT_STORABLE|DOES_NOT_FIT"):
            launch(problem, KERNELS[0], out=out)
        assert bool(out.isnan().all())


def test_ieee_never_takes_slices(rng: torch.Generator) -> None:
    """`ieee` is torch's own product, bit for bit, even where `highest` takes the split."""
    x, weight = (signed((2048, 2048), rng, mixed=False).to(DEVICE, torch.float32) for _ in range(2))
    assert torch.equal(epigemm.linear(x, weight, precision="ieee"), products.sgemm(x, weight))


def test_every_arithmetic_has_tiles() -> None:
    assert all(plans.tile_count(plans.FP16X3, each.name) for each in (SPLIT, SCALED))
