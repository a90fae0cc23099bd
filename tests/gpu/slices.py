"""What kernels on fp16 slices have in common: packs, any strides, the range check and its fixup, accuracy."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gradings import bounds, data, products, sweep
from benchmarks.gradings.measures import Exact, errors
from benchmarks.gradings.products import SCALED, SPLIT, Product
from epigemm._native import ops
from epigemm.packs.weight_packs import SLICES, pack_bytes
from tests.gpu.launching import DEVICE, Kernel, captured, checked, launch
from tests.gpu.properties import OfKernels, assert_frame_stays, epilogues
from tests.support import exact, special
from tests.support.arithmetic import Arithmetic
from tests.support.cases import signed
from tests.support.problems import Problem, make
from tests.support.watching import POISON

SIZE = (sweep.ROWS, sweep.COLUMNS)
# Sums of many products that count. In other classes few do, and 22 bits of each are less than 24.
DENSE = ["uniform_linear", "normal", "rows_8", "rows_30", "rows_60"]


def make_pack(problem: Problem) -> Tensor:
    """The weight, split for keeping."""
    return products.make_pack(problem.weight, problem.arithmetic.name)


def product_of(kernel: Kernel) -> Product:
    """As a function of two matrices. Columns of zeros make rows whole 16 bytes where the weight is read as it lies."""
    product = products.forced(kernel.arithmetic.name, kernel.plan())
    if not kernel.reads_weight:
        return product

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = (functional.pad(each, (0, -each.shape[1] % 4)) for each in (x, weight))
        return product(x, kernel.lay(weight))

    return whole


def bound(arithmetic: str, k: int) -> float:
    """Of the error of a sum of K products, over the sum of their sizes."""
    return bounds.split(k) if arithmetic == SPLIT else bounds.scaled(k)


def beyond_slices(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> Problem:
    """With elements that are not finite, and rows whose range slices cannot hold."""
    problem = make(name, arithmetic, (300, 264, 200), rng)
    problem.x[5, 7], problem.x[299, 199], problem.weight[200, 0] = math.inf, math.nan, -math.inf
    problem.x[100] *= 2.0**-40
    problem.x[100, 3] = 1.0
    problem.weight[:, 3] *= 2.0**-60
    return problem


def assert_no_less_accurate(point: sweep.Point, arithmetic: str) -> None:
    """Than the product that the arithmetic stands in for, by much less than its error."""
    assert point.as_accurate(arithmetic), (
        point.data,
        point.k,
        point.times_baseline(arithmetic),
        point.errors,
    )


BASELINES = {SPLIT: products.sgemm, SCALED: products.tf32}


class PackedWeights(OfKernels):
    """Of kernels that read slices of the weight."""

    @epilogues
    def test_a_kept_pack_changes_nothing(self, name: str, kernel: Kernel, rng: torch.Generator) -> None:
        for sizes in ((300, 264, 136), (5, 12, 33)):
            problem = make(name, kernel.arithmetic, sizes, rng)
            pack = make_pack(problem)
            kept = pack.clone()
            assert torch.equal(checked(problem, kernel, pack=pack), launch(problem, kernel))
            assert torch.equal(pack, kept), "the pack was written to"

    def test_packs_need_no_clean_memory(self, kernel: Kernel, rng: torch.Generator) -> None:
        """K = 77 leaves padding columns, which the split must write as zeros over whatever was there."""
        problem = make("bias", kernel.arithmetic, (40, 36, 77), rng)
        slices = SLICES[kernel.arithmetic.name]
        results = []
        for byte in (0, POISON):
            pack = torch.full((pack_bytes(36, 77, slices),), byte, dtype=torch.uint8, device=DEVICE)
            ops._split_rows_out(problem.weight, slices, pack)
            results.append(launch(problem, kernel, pack=pack))
        assert torch.equal(results[0], results[1])


class OnSlices(OfKernels):
    """`graded`: of each arithmetic, classes of data and K at which its error is compared with what it stands for."""

    graded: ClassVar[dict[str, list[tuple[str, int]]]]

    def test_overlapping_and_expanded_rows(self, kernel: Kernel, rng: torch.Generator) -> None:
        """x as overlapping windows of one vector, or one row many times: strides that no copy made."""
        series = signed((1000,), rng).to(DEVICE, torch.float32)
        windows = series.unfold(0, 200, 3)
        for x in (windows, series[:200].expand(windows.shape)):
            problem = make("bias_relu", kernel.arithmetic, (len(x), 64, 200), rng)
            problem.x = x
            checked(problem, kernel)

    @epilogues
    def test_what_is_computed_again_gets_the_epilogue_too(
        self, name: str, kernel: Kernel, rng: torch.Generator
    ) -> None:
        checked(beyond_slices(name, kernel.arithmetic, rng), kernel)

    def test_what_is_computed_again_stays_within_the_result(
        self, kernel: Kernel, rng: torch.Generator
    ) -> None:
        problem = make("bias", kernel.arithmetic, (130, 136, 64), rng)
        problem.x[-1, -1], problem.weight[-1, 0] = math.inf, math.nan
        assert_frame_stays(problem, kernel)

    def test_a_graph_follows_its_inputs(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Also to numbers that need the fixup: nothing about the data is decided at the capture."""
        problem = make("bias_relu", kernel.arithmetic, (256, 264, 256), rng)
        ordinary, out = problem.x.clone(), problem.out()
        graph = captured(lambda: launch(problem, kernel, out=out))
        for value in (1.0, math.inf, math.nan, 2.0):
            problem.x.copy_(ordinary)
            problem.x[17, 9] = value
            out.fill_(5.5)
            graph.replay()
            problem.check(out)
        problem.weight[3, 3] = math.inf
        graph.replay()
        problem.check(out)

    def test_results_repeat_bit_for_bit(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias_gelu", kernel.arithmetic, (1000, 1032, 2048), rng)
        first = launch(problem, kernel)
        for _ in range(5):
            assert torch.equal(launch(problem, kernel), first)

    # --- accuracy ----------------------------------------------------------------------------------------------------

    def test_no_less_accurate_than_what_it_stands_for(self, kernel: Kernel) -> None:
        """Tiles differ in how they accumulate and promote."""
        kind = kernel.arithmetic.name
        graded = {products.BASELINE[kind]: BASELINES[kind], kind: product_of(kernel)}
        for name, k in self.graded[kind]:
            point = sweep.grade(graded, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
            assert_no_less_accurate(point, kind)
            assert kind != SPLIT or point.errors[SPLIT].blas < 1

    @pytest.mark.parametrize("name", [each.name for each in (*data.CLASSES, *data.EXTREME)])
    def test_every_class_keeps_the_derived_bound(self, name: str, kernel: Kernel) -> None:
        for k in (16, 256, 4096):
            x, weight = data.BY_NAME[name].make(*SIZE, k, 0, DEVICE)
            found = errors(product_of(kernel)(x, weight), Exact.of(x, weight))
            assert found.max_ratio <= bound(kernel.arithmetic.name, k) / bounds.EPS, (k, found)

    def test_gradings(self, kernel: Kernel) -> None:
        """Whole numbers; Demmel's exact zeros, and the circulant test up to 2^+-50, where the guard must act."""
        product = product_of(kernel)
        verdicts = [*exact.integer_verdicts(product, DEVICE), *exact.demmel_verdicts(product, DEVICE)]
        relative = max(bounds.scaled(special.K), 2.0**-9 + 2 * bounds.sgemm(special.K))
        if kernel.arithmetic.name == SPLIT:
            verdicts += exact.representation_verdicts(product, DEVICE)
            relative = special.EXACT_ENOUGH
        for verdict in (*verdicts, *special.special_verdicts(product, DEVICE, relative)):
            assert verdict.ok, verdict

    def test_a_power_of_two_scales_the_result_exactly(self, kernel: Kernel) -> None:
        """Scales are powers of two throughout: rows of x times 2^e give rows of the same bits, times 2^e."""
        x, weight = data.BY_NAME["uniform_linear"].make(*SIZE, 2048, 0, DEVICE)
        exponents = data.Draw.seeded(1, DEVICE).exponents(SIZE[0], 1, 40)
        product = product_of(kernel)
        found = product(torch.ldexp(x, exponents), weight)
        assert torch.equal(found, torch.ldexp(product(x, weight), exponents))
