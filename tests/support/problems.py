"""Linear problems: what `make` draws for an epilogue of the registry or of a user, how it is run, and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigemm import ResultsEpilogue, UserEpilogue
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.library import named
from epigemm.epilogues.registry import Epilogue, typed
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
        given = self.operands
        about = (self.name, self.x, self.weight, given.bias, given.tensors, given.scalars)
        torch.ops.epigemm.linear_out(*about, self.arithmetic.op_precision, out)
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
        # The first question in a process makes the device ready; a dry run does not.
        plans.has_gpu_kernels(out)
        if plan:
            numbers = (dry_runs.ARITHMETICS.index(self.arithmetic.schema_arithmetic), *plan)
            actual = resolve.linear(self.call(out), numbers)
        elif not dry_runs.dry_run(self.call(out)).fused:
            return None
        else:
            actual = self.run(out)
        assert actual is out
        return out

    def check(self, actual: torch.Tensor, *, second_path: bool = False) -> None:
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
    of: str | UserEpilogue | ResultsEpilogue,
    arithmetic: Arithmetic,
    sizes: tuple[int, int, int],
    rng: torch.Generator,
    *,
    device: torch.device | str = "cuda",
    x_layout: Layout = contiguous,
    weight_layout: Layout = contiguous,
    whole: bool = False,
    with_bias: bool = True,
    tensor_scalars: bool = False,
    wide: Collection[str] = (),
    gap: int = 0,
) -> Problem:
    """Random numbers for an epilogue of the registry, by its name, or for a function of a user.

    `whole`: numbers whose sums are exact. `with_bias`, `tensor_scalars`: of the registry's. `wide`: operands of a
    user's in fp32; `gap`: behind the rows of its matrices.
    """
    m, n, k = sizes
    draw = ternary if whole else signed
    x, weight = (draw((rows, k), rng).to(device, arithmetic.dtype) for rows in (m, n))
    formula = None
    if isinstance(of, str):
        drawn = {"with_bias": with_bias, "tensor_scalars": tensor_scalars}
        name, operands = of, draw_operands(of, n, arithmetic, device, rng, **drawn)
    else:
        folded, operands = _operands_of(of, arithmetic, (m, n), device, rng, wide, gap)
        name = typed(of.traced, folded).name if isinstance(of, UserEpilogue) else ""
        formula = formula_of(of)
    if whole:
        operands = operands.map(lambda tensor: ternary(tuple(tensor.shape), rng).to(tensor))
        operands.scalars = [2.0 for _ in operands.scalars]
    return Problem(name, arithmetic, x_layout(x), weight_layout(weight), operands, formula)


def _operands_of(
    function: UserEpilogue | ResultsEpilogue,
    arithmetic: Arithmetic,
    shape: tuple[int, int],
    device: torch.device | str,
    rng: torch.Generator,
    wide: Collection[str],
    gap: int,
) -> tuple[list[bool], Operands]:
    """Which of a user's operands are in fp32, and all of them."""
    m, n = shape
    operands, folded = Operands(), []
    for operand in function.traced.operands:
        is_wide = operand.kind == SCALAR or (operand.name in wide and arithmetic.dtype.itemsize == 2)
        folded.append(is_wide)
        if operand.kind == SCALAR:
            operands.scalars.append(-1.75)
            continue
        *lead, columns = KINDS[operand.kind].shape((m,), n)
        columns += gap * (operand.kind == MATRIX)
        value = signed((*lead, columns), rng).to(device, torch.float32 if is_wide else arithmetic.dtype)
        operands.tensors.append(value[..., :n] if operand.kind == MATRIX else value)
    return folded, operands


def formula_of(
    function: UserEpilogue | ResultsEpilogue, result: int | None = None
) -> Callable[[Tensor, Operands], Tensor]:
    """The Python function itself, or one of its results, of an accumulator and operands in float64."""
    plain: Callable[..., Any] = vars(function)["__wrapped__"]

    def evaluate(acc: Tensor, given: Operands) -> Tensor:
        tensors, numbers = iter(given.tensors), iter(given.scalars)
        values = [
            next(numbers) if operand.kind == SCALAR else next(tensors) for operand in function.traced.operands
        ]
        found = plain(acc, *values)
        return found if result is None else found[result]  # type: ignore[no-any-return]

    return evaluate


def ternary(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Integers -1, 0, 1: every partial sum is exact in fp32."""
    return torch.randint(-1, 2, shape, generator=rng).double()
