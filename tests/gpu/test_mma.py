"""The mma.sync kernels, also on GPUs other than Hopper, where nobody has run them yet."""

from __future__ import annotations

import math
from itertools import product
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.gpu.launching import DEVICE, Kernel, captured, checked, cuda, every_kind, every_tile, launch
from tests.gpu.properties import Family, RowsAlone, SharedRows, Values
from tests.gpu.slices import DENSE, OnSlices, PackedWeights, make_pack
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, SCALED, SPLIT, SPLIT_ARITHMETICS, TF32
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mma_kernels")]

BY_ELEMENTS = (8, 9)  # csrc/gemm/sm80_mma/tiles.h
IN_PARTS = range(8)
"""The tiles that may share K."""
HALVES = (FP16, BF16)
AS_THEY_ARE = (*HALVES, TF32)


class TestAsTheyAre(Family, SharedRows, RowsAlone):
    kernels = every_tile(plans.MMA, AS_THEY_ARE)
    sizes = ((384, 512, 256), (129, 264, 136), (1, 8, 8), (200, 1032, 64))
    depths = (8, 16, 24, 32, 48, 64, 72, 96, 128, 192, 200, 256, 1000)

    def test_more_tiles_than_multiprocessors(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Of the large tiles a CTA computes several: of K less than its ring has, and more."""
        rows = 128 * cuda.get_device_properties(DEVICE).multi_processor_count // 4
        for k in (8, 72, 520):
            checked(make("bias_gelu", kernel.arithmetic, (rows + 5, 2568, k), rng), kernel, 0, 8)


class TestInTF32(Values):
    kernels = every_tile(plans.MMA, [TF32])
    sizes = ((129, 264, 76),)
    depths = (4, 12, 20, 36, 100)

    @pytest.mark.parametrize("is_x", [True, False], ids=["x", "weight"])
    def test_the_nearest(self, kernel: Kernel, is_x: bool) -> None:
        """Of both operands, ties away from zero; infinities and NaNs stay."""
        step, inf = 2.0**-10, math.inf  # of TF32 between 1 and 2
        given = [
            1.0,
            1 + step / 4,
            1 + step / 2,
            1 + 3 * step / 4,
            -1 - step / 2,
            -1 - step / 4,
            inf,
            math.nan,
        ]
        wanted = [1.0, 1.0, 1 + step, 1 + step, -1 - step, -1.0, inf, math.nan]
        row, ones = torch.zeros(2, 8, 8, device=DEVICE)
        row[:, 0] = torch.tensor(given, device=DEVICE)
        ones[:, 0] = 1
        problem = make("bias", TF32, (8, 8, 8), torch.Generator(), with_bias=False)
        problem.x, problem.weight = (row, ones) if is_x else (ones, row)
        found = launch(problem, kernel)
        found = found if is_x else found.t()
        expected = torch.tensor(wanted, device=DEVICE)[:, None].expand(8, 8)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.0, 7.0), expected.nan_to_num(0.0, 7.0))


class TestByElements(Values):
    """Rows of any length, and wherever they begin."""

    kernels = every_tile(plans.MMA, HALVES, only=BY_ELEMENTS)
    sizes = ((1, 1, 1), (1, 1000, 513), (33, 65, 17), (129, 255, 63), (200, 1031, 100), (16, 64, 4097))
    depths = (1, 7, 33, 63, 65, 1001)

    @pytest.mark.parametrize(
        "layout", ["padded_rows", "aligned_rows", "odd_rows", "every_second_row", "misaligned"]
    )
    def test_rows_that_lie_anywhere(self, kernel: Kernel, layout: str, rng: torch.Generator) -> None:
        change = LAYOUTS[layout]
        for sizes in self.sizes:
            problem = make("bias_relu", kernel.arithmetic, sizes, rng)
            expected, x, weight = checked(problem, kernel), problem.x, problem.weight
            for problem.x, problem.weight in ((change(x), weight), (x, change(weight))):
                assert torch.equal(launch(problem, kernel), expected)

    @pytest.mark.parametrize("wide", [(), ("bias", "row", "other", "more")], ids=["16 bits", "fp32"])
    def test_operands_beside_odd_rows(
        self, kernel: Kernel, wide: tuple[str, ...], rng: torch.Generator
    ) -> None:
        problem = make(every_kind, kernel.arithmetic, (131, 257, 67), rng, wide=wide)
        *_, other, more = problem.operands.tensors
        problem.operands.tensors[-2:] = [LAYOUTS["misaligned"](other), LAYOUTS["odd_rows"](more)]
        checked(problem, kernel)

    def test_columns_are_refused(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("bias", kernel.arithmetic, (64, 65, 64), rng, x_layout=LAYOUTS["transposed"])
        with pytest.raises(RuntimeError, match="plan: x is not a row-major matrix"):
            problem.run_fused(kernel.plan())
        with pytest.raises(
            RuntimeError, match="plan: splits must be 1 for a tile that loads by elements, got 2"
        ):
            launch(make("bias", kernel.arithmetic, (64, 72, 128), rng), kernel._replace(splits=2))


class TestSpecialValues:
    """They stay in their row, in whichever share of K they are."""

    kernels = (
        *every_tile(plans.MMA, HALVES),
        *every_tile(plans.MMA, HALVES, splits=(2, 4, 8), only=IN_PARTS),
    )

    def test_special_values_stay_in_their_row(self, kernel: Kernel, rng: torch.Generator) -> None:
        problem = make("relu_div", kernel.arithmetic, (150, 264, 1032), rng)
        clean = Problem("relu_div", kernel.arithmetic, problem.x.clone(), problem.weight, problem.operands)
        for row, column, value in ((3, 5, math.nan), (77, 0, math.inf), (149, 1031, -math.inf)):
            problem.x[row, column] = value
        spoiled = torch.zeros(150, dtype=torch.bool, device=DEVICE)
        spoiled[[3, 77, 149]] = True
        found = checked(problem, kernel)
        assert torch.equal(found[~spoiled], launch(clean, kernel)[~spoiled])


class TestSharedK(Values, RowsAlone):
    """CTAs share the K of a tile: in tiles that are not full, by one stage each, equally, and one a stage longer."""

    kernels = every_tile(plans.MMA, (*AS_THEY_ARE, *SPLIT_ARITHMETICS), splits=(2, 4, 8), only=IN_PARTS)
    sizes = ((17, 264, 1024), (129, 136, 1160), (300, 520, 520), (1, 72, 2048))
    depths = (72, 128, 168, 200, 256, 296, 408, 456, 512, 552, 808, 1608, 2000)

    def test_whole_numbers_have_the_bits_of_one_share(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Where every sum is exact, it does not matter how K is divided."""
        problem = make("bias_gelu", kernel.arithmetic, (130, 264, 1032), rng, whole=True)
        whole = launch(problem, kernel._replace(splits=1))
        for swizzle in (1, 2):
            assert torch.equal(launch(problem, kernel, swizzle % 2, swizzle), whole)

    def test_the_same_bits_at_every_call(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Of more CTAs than run at once, which end in any order."""
        problem = make("bias", kernel.arithmetic, (260, 4096, 4104), rng)
        first = checked(problem, kernel)
        for _ in range(10):
            assert torch.equal(launch(problem, kernel), first)

    def test_gaps_between_rows_are_left_alone(self, kernel: Kernel, rng: torch.Generator) -> None:
        rows = LAYOUTS["padded_rows"]
        problem = make(
            "bias_relu", kernel.arithmetic, (130, 264, 520), rng, x_layout=rows, weight_layout=rows
        )
        memory = torch.full((130, 280), 7.0, dtype=kernel.dtype, device=DEVICE)
        checked(problem, kernel, out=memory[:, :264])
        assert (memory[:, 264:] == 7.0).all()

    def test_a_graph_follows_its_inputs(self, kernel: Kernel, rng: torch.Generator) -> None:
        """The counters are cleared at every replay."""
        problem = make("bias", kernel.arithmetic, (100, 264, 1032), rng)
        out = problem.out()
        graph = captured(lambda: launch(problem, kernel, out=out))
        for scale in (1.0, -0.5, 2.0):
            problem.x.mul_(scale)
            out.fill_(5.5)
            graph.replay()
            assert torch.equal(out, launch(problem, kernel))
            problem.check(out)

    def test_two_streams_at_once(self, kernel: Kernel, rng: torch.Generator) -> None:
        """Each call has its own workspace."""
        both = [make("bias_relu", kernel.arithmetic, (64, 1032, 2056), rng) for _ in range(2)]
        streams = [cuda.Stream() for _ in both]
        wanted = [checked(problem, kernel) for problem in both]
        for _ in range(20):
            found: list[Tensor] = []
            cuda.synchronize()
            for problem, stream in zip(both, streams, strict=True):
                with cuda.stream(stream):
                    found.append(launch(problem, kernel))
            cuda.synchronize()
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class TestSharedKOnSlices(Values):
    kernels = every_tile(plans.MMA, SPLIT_ARITHMETICS, splits=(2, 4, 8))
    sizes = ((70, 136, 777),)
    depths = (73, 201, 402, 457, 804, 1608)

    def test_a_kept_pack_changes_nothing(self, kernel: Kernel, rng: torch.Generator) -> None:
        """The sums lie behind what slices take of the workspace, with and without those of the weight."""
        problem = make("bias", kernel.arithmetic, (300, 264, 777), rng)
        assert torch.equal(checked(problem, kernel), launch(problem, kernel, pack=make_pack(problem)))


class TestOnSlices(Family, SharedRows, RowsAlone, OnSlices, PackedWeights):
    """fp32 on fp16 slices. No call chooses them on Hopper, whose kernels have the same split, packs and fixup."""

    kernels = every_tile(plans.MMA, SPLIT_ARITHMETICS)
    sizes = ((384, 512, 256), (129, 264, 136), (1, 4, 1), (33, 60, 77), (200, 1032, 65), (257, 132, 1031))
    depths = (1, 31, 32, 33, 63, 64, 65, 96, 128, 129, 160, 480, 511, 512, 513, 544, 1024, 1500, 4097)
    lying = tuple(LAYOUTS)
    graded: ClassVar = {
        SPLIT.name: list(product([*DENSE, "positive"], [128, 512, 1024, 4096, 16384, 32768])),
        SCALED.name: list(product([*DENSE, "positive"], [64, 1024, 8192])),
    }


def test_plans_that_do_not_exist_are_refused(rng: torch.Generator) -> None:
    for arithmetic in (BF16, *SPLIT_ARITHMETICS):
        problem = make("bias", arithmetic, (64, 64, 128), rng)
        last = every_tile(plans.MMA, [arithmetic])[-1]
        with pytest.raises(RuntimeError, match="plan: tile must be in"):
            launch(problem, last._replace(tile=last.tile + 1))
        with pytest.raises(RuntimeError, match="plan: K is too short for 8 splits"):
            launch(problem, last._replace(tile=0, splits=8))
