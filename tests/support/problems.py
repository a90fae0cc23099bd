"""Linear problems as test cases: shapes, the ways to run them, and how a result is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.library import named
from epigemm.epilogues.registry import Epilogue
from epigemm.planner import dry_runs, plans
from tests.support import reference
from tests.support.arithmetic import Arithmetic
from tests.support.cases import Operands, draw_operands, poisoned, signed
from tests.support.layouts import Layout, contiguous

# M, N, K in which something has no elements: a K of 0 is an empty sum, not an empty result.
EMPTY_SHAPES = [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 1, 0), (0, 1, 1)]


@dataclass
class Problem:
    name: str
    arithmetic: Arithmetic
    x: torch.Tensor
    weight: torch.Tensor
    operands: Operands
    formula: reference.Formula | None = None  # of a function of a user; None: the registry's

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

    def call(self, out: torch.Tensor | None = None) -> LinearCall:
        """The call, as the operators take it."""
        epilogue = named(self.name)
        assert epilogue is not None
        given = epilogue.in_order(*self.apart(epilogue))
        assert given is not None
        return LinearCall(epilogue, self.x, self.weight, given, self.arithmetic.op_precision, out=out)

    def apart(self, epilogue: Epilogue) -> tuple[torch.Tensor | None, list[torch.Tensor], list[float]]:
        """The operands as operators take them: the bias of a function of a user is among the tensors here."""
        given, place = self.operands, epilogue.bias_place
        if self.formula is None or not place:
            return given.bias, given.tensors, given.scalars
        before = sum(each.kind != SCALAR for each in epilogue.operands[: place - 1])
        tensors = list(given.tensors)
        return tensors.pop(before), tensors, given.scalars

    def run_fused(
        self, plan: list[int] | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The fused kernel alone, the planner's or another; None where the planner has none."""
        out = self.out() if out is None else out
        plans.has_gpu_kernels(
            out
        )  # the first question in a process makes the device ready; a dry run does not
        if plan:
            numbers = (dry_runs.ARITHMETICS.index(self.arithmetic.schema_arithmetic), *plan)
            actual = resolve.linear(self.call(out), numbers)
        elif not dry_runs.dry_run(self.call(out)).fused:
            return None
        else:
            actual = self.run(out)
        assert actual is out
        return out

    def check(self, actual: torch.Tensor, *, second_path: bool) -> None:
        reference.assert_within(actual, self.expected(second_path=second_path))

    def expected(
        self, formula: str | reference.Formula | None = None, *, second_path: bool = False
    ) -> reference.Bounded:
        """In float64. `formula`: another function of the same operands."""
        of = formula or self.formula or self.name
        return reference.linear(
            of, self.x, self.weight, self.operands, self.arithmetic, second_path=second_path
        )


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
