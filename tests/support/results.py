"""Functions with several results, what they give in float64, and how far a call may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, STORE, SUM, Result, structured
from tests.ops.users import SEVERAL

Pair = tuple[Tensor, Tensor]
_of_users: list[Any] = [epigemm.epilogue(formula) for formula, *_ in SEVERAL]
_, every_reduction, _, squares, of_rows, ended, in_fp32, of_every_operand = _of_users


@epigemm.epilogue
def gelu_and_product(acc: Tensor, bias: PerColumn) -> Pair:
    z = acc + bias
    return F.gelu(z), z


@epigemm.epilogue
def statistics(acc: Tensor, bias: PerColumn, scale: PerColumn) -> tuple[Tensor, Pair, list[Tensor]]:
    z = (acc + bias) * scale
    return z, torch.var_mean(z, 0, correction=0), [z.var(1), z.sum(0, keepdim=True), z.amax(1, keepdim=True)]


@epigemm.epilogue
def of_a_row(acc: Tensor, row: PerRow) -> list[Tensor]:
    return [(acc * row).sum(1)]


@epigemm.epilogue
def the_product_twice(acc: Tensor) -> Pair:
    return acc, acc


@epigemm.epilogue
def without_the_product(acc: Tensor, bias: PerColumn, other: Matrix) -> tuple[Tensor, ...]:
    return torch.full_like(acc, -0.0), torch.full_like(acc, 0.0), other, torch.exp(other) * bias


@epigemm.epilogue
def late(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
    y = torch.sigmoid(F.relu(acc + bias) * 0.5 + 0.25)
    return y, y.sum(0), y * y, (y - 0.5).amax(0)


FUNCTIONS: list[ResultsEpilogue] = [
    *(gelu_and_product, every_reduction, statistics, squares, of_rows, ended, in_fp32, of_every_operand),
    *(of_a_row, the_product_twice, without_the_product, late),
]
NAMES = [function.traced.name for function in FUNCTIONS]


@dataclass
class Given:
    """A call's tensors."""

    x: Tensor
    weight: Tensor
    operands: list[Any]

    @property
    def product(self) -> Tensor:
        """In float64."""
        return self.x.double() @ self.weight.double().t()

    def leaves(self) -> list[Tensor]:
        """The tensors, with gradients."""
        every = (self.x, self.weight, *self.operands)
        return [each.requires_grad_() for each in every if isinstance(each, Tensor)]


def draw(
    function: ResultsEpilogue,
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lead: tuple[int, ...] = (37,),
    n: int = 24,
    k: int = 40,
    *,
    of_operands: torch.dtype | None = None,
) -> Given:
    """A call with a product of about one."""

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(device, of)

    operands = [
        0.75 if kind == SCALAR else random(*KINDS[kind].callers_shape(lead, n), of=of_operands or dtype)
        for kind in function.traced.kinds
    ]
    return Given(random(*lead, k), random(n, k) / max(k, 1) ** 0.5, operands)


def wanted(function: ResultsEpilogue, acc: Tensor, operands: Sequence[Any]) -> list[Tensor]:
    """The results of the Python function itself in float64, in the shapes that a call gives."""
    lead, columns = acc.shape[:-1], acc.shape[-1]
    rows = math.prod(lead)
    seen: list[Any] = []
    for kind, value in zip(function.traced.kinds, operands, strict=True):
        if isinstance(value, Tensor):
            value = value.double()
            if KINDS[kind].by_row:
                value = value.reshape(rows, columns if kind == MATRIX else 1)
        seen.append(value)
    plain: Callable[..., Any] = vars(function)["__wrapped__"]
    found, _ = structured(plain(acc.double().reshape(rows, columns), *seen))
    pairs = zip(function.results, found, strict=True)
    return [each.reshape(result.shape(lead, columns)) for result, each in pairs]


def dtype_of(result: Result, dtype: torch.dtype) -> torch.dtype:
    """What a result is stored in, beside an x of this dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.float32 if result.is_fp32 else dtype if result.kind == STORE else wide


UNITS = {torch.float32: 2.0**-20, torch.float64: 2.0**-46}


def bound(
    result: Result, want: Tensor, dtype: torch.dtype, shape: Sequence[int], size: float = 8.0
) -> Tensor:
    """How far a result may be off, of a matrix `[..., N]` of this shape with elements of this size at most.

    An element: two roundings to the dtype (of the shared matrix and of the result), steps that are not steep. A sum of
    n such, each off by itself: by the root of n times one of them. A variance: by twice the deviation times one.
    """
    unit = UNITS.get(dtype, torch.finfo(dtype).eps)
    if result.is_fp32:
        unit = max(unit, torch.finfo(torch.float32).eps)
    of_one = unit * (want.abs() + size)
    count = max(shape[-1] if result.axis else math.prod(shape[:-1]), 1)
    if result.kind in (STORE, AMAX, AMIN):
        return of_one
    if result.kind == SUM:
        return unit * size * math.sqrt(count) * torch.ones_like(want) + unit * want.abs()
    return of_one if result.kind == MEAN else of_one * size


def assert_results(
    function: ResultsEpilogue, got: Any, want: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """All results, their shapes and dtypes; `shape`: of the matrix."""
    found, structure = structured(got)
    assert structure == function.traced.results.structure, (
        "one tensor twice exactly where the function returns it so"
    )
    assert len(found) == len(want) == len(function.results)
    for number, (result, one, other) in enumerate(zip(function.results, found, want, strict=True)):
        about = f"result {number} of {function.traced.name}: {result}"
        assert one.dtype == dtype_of(result, dtype), about
        assert one.shape == other.shape, about
        off = (one.double() - other).abs() > bound(result, other, dtype, shape)
        assert not bool(off.any()), f"{about}: {int(off.sum())} of {off.numel()} are off"
        assert torch.equal(one.isnan(), other.isnan()), about
