"""Linear problems as test cases: shapes, the ways to run them, and how a result is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gradings.products import link_plan
from epigemm._native import build_info
from tests.support import reference
from tests.support.arithmetic import FP32, FP64, Arithmetic
from tests.support.cases import Operands, draw_operands, poisoned, signed
from tests.support.layouts import Layout, contiguous

# M, N, K. Small enough for a CPU; sizes around 16 bytes, one vector register and the CPU loop's blocks.
SMALL_SHAPES = [
    (1, 1, 1),
    (1, 1, 8),
    (2, 3, 5),
    (7, 8, 9),
    (1, 64, 32),
    (5, 1, 33),
    (17, 31, 64),
    (33, 65, 17),
    (64, 128, 64),
    (257, 8, 40),  # tall
    (4, 520, 24),  # wide
    (8, 16, 600),  # long sums
]
# Shapes in which something has no elements: a K of 0 is an empty sum, not an empty result.
EMPTY_SHAPES = [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 1, 0), (0, 1, 1)]


@dataclass
class Problem:
    name: str
    arithmetic: Arithmetic
    x: torch.Tensor
    weight: torch.Tensor
    operands: Operands

    def out(self) -> torch.Tensor:
        shape = (*self.x.shape[:-1], self.weight.shape[0])
        return poisoned(shape, self.arithmetic.dtype, self.x.device)

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The public op, into a poisoned buffer."""
        out = self.out() if out is None else out
        torch.ops.epigemm.linear_out(
            self.name,
            self.x,
            self.weight,
            self.operands.bias,
            self.operands.tensors,
            self.operands.scalars,
            self.arithmetic.op_precision,
            out,
        )
        return out

    def link(self, plan: list[int] | None) -> None:
        """Load the plan's kernel; that of every plan where it is not known, and none where there is none."""
        is_covered = self.arithmetic not in (FP32, FP64)
        if not self.x.is_cuda or not (plan or is_covered):
            return
        every = (
            [plan]
            if plan
            else [
                [family, tile, 0, 1, 1]
                for family, tiles in enumerate(build_info()["families"].values())
                for tile in range(tiles.get("tf32", 0))
            ]
        )
        for each in every:
            link_plan(self.name, self.x, self.arithmetic.schema_arithmetic, each)

    def run_fused(self, plan: list[int] | None = None) -> torch.Tensor | None:
        """The fused kernel alone; None when it declines, having written nothing."""
        out = self.out()
        self.link(plan)
        launched = torch.ops.epigemm._fused_linear_out(
            self.name,
            self.x,
            self.weight,
            self.operands.bias,
            self.operands.tensors,
            self.operands.scalars,
            self.arithmetic.schema_arithmetic,
            plan or [],
            out,
        )
        if launched:
            return out
        assert bool(out.isnan().all()), "declined, yet wrote to out"
        return None

    def check(self, actual: torch.Tensor, *, second_path: bool) -> None:
        bounded = reference.linear(
            self.name, self.x, self.weight, self.operands, self.arithmetic, second_path=second_path
        )
        reference.assert_within(actual, bounded)


def make(
    name: str,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    device: torch.device | str,
    rng: torch.Generator,
    *,
    x_layout: Layout = contiguous,
    weight_layout: Layout = contiguous,
    with_bias: bool = True,
    tensor_scalars: bool = False,
) -> Problem:
    m, n, k = shape
    x = signed((m, k), rng).to(device, arithmetic.dtype)
    weight = signed((n, k), rng).to(device, arithmetic.dtype)
    operands = draw_operands(
        name, n, arithmetic, device, rng, with_bias=with_bias, tensor_scalars=tensor_scalars
    )
    return Problem(name, arithmetic, x_layout(x), weight_layout(weight), operands)


def ternary(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Integers -1, 0, 1: every partial sum is exact in fp32."""
    return torch.randint(-1, 2, shape, generator=rng).double()
