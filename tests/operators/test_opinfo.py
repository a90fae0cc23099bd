"""PyTorch's own cases: the samples of its operator tests through our functions.

Forward: within the derived bounds of `tests.support.reference`, and of torch's dtype and shape.
Gradients: those of torch's operators, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm.epilogues.registry import fold_batch_norm_reference
from tests.support import reference
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import Operands
from tests.support.opinfo import Sample, samples

arithmetics = pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
SCALE = -1.75


@dataclass(frozen=True)
class Case:
    """A sample as a call of ours, and the program of torch's operators that it stands for."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]  # the tensors that both take
    bound: Callable[[Arithmetic], reference.Bounded]


def linear_cases(sample: Sample) -> Iterator[Case]:
    """F.linear's samples, and what may follow: each epilogue that has a linear form."""
    x, (weight, *rest) = sample.x, sample.args
    bias = rest[0] if rest else None
    leaves = (x, weight) if bias is None else (x, weight, bias)
    for name, ours, after, scalars in (
        ("bias", epigemm.linear, lambda z: z, []),
        ("bias_relu", epigemm.linear_relu, torch.relu, []),
        (
            "sigmoid_scale_residual",
            lambda x, weight, bias=None: epigemm.linear_sigmoid_scale_residual(x, weight, bias, SCALE),
            lambda z: z + SCALE * torch.sigmoid(z),
            [SCALE],
        ),
        (
            "relu_div",
            lambda x, weight, bias=None: epigemm.linear_relu_div(x, weight, bias, SCALE),
            lambda z: torch.relu(z) / SCALE,
            [SCALE],
        ),
    ):

        def bound(
            arithmetic: Arithmetic, name: str = name, scalars: list[float] = scalars
        ) -> reference.Bounded:
            operands = Operands(bias, [], scalars)
            return reference.linear(name, x, weight, operands, arithmetic, second_path=True)

        def theirs(*args: Tensor, after: Callable[[Tensor], Tensor] = after) -> Tensor:
            return after(F.linear(*args))

        yield Case(ours, theirs, leaves, bound)


def pointwise(name: str, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> Any:
    """The cases of an operator on one tensor, which an elementwise epilogue computes."""

    def cases(sample: Sample) -> Iterator[Case]:
        def bound(arithmetic: Arithmetic) -> reference.Bounded:
            return reference.elementwise(name, sample.x, Operands(), arithmetic)

        yield Case(ours, theirs, (sample.x,), bound)

    return cases


def batch_norm_cases(sample: Sample) -> Iterator[Case]:
    """Inference: one kernel; ours has the channels last, where a linear layer leaves them."""
    mean, variance, *affine = (*sample.args, None, None)[:4]
    eps = sample.kwargs.get("eps", 1e-5)
    if sample.kwargs.get("training", False) or mean is None:
        return
    given = [vector for vector in affine if vector is not None]

    def ours(x: Tensor, *affine: Tensor) -> Tensor:
        columns_last = x.movedim(1, -1) if x.dim() > 1 else x
        weight, bias = affine or (None, None)
        result = epigemm.scale_batch_norm(columns_last, None, mean, variance, weight, bias, eps)
        return result.movedim(-1, 1) if x.dim() > 1 else result

    def theirs(x: Tensor, *affine: Tensor) -> Tensor:
        weight, bias = affine or (None, None)
        return F.batch_norm(x, mean.to(x), variance.to(x), weight, bias, False, 0.1, eps)

    def bound(arithmetic: Arithmetic) -> reference.Bounded:
        x = sample.x.movedim(1, -1) if sample.x.dim() > 1 else sample.x
        vectors = [None if each is None else each.detach() for each in (mean, variance, *affine)]
        multiplier, offset = fold_batch_norm_reference(x.double(), (None, None, *vectors), eps)
        bounded = reference.elementwise(
            "scale_batch_norm", x, Operands(None, [multiplier, offset]), arithmetic
        )
        back = (
            each.movedim(-1, 1) if x.dim() > 1 else each for each in (bounded.expected, bounded.tolerance)
        )
        return reference.Bounded(*back)

    yield Case(ours, theirs, (sample.x, *given), bound)


@dataclass(frozen=True)
class Operator:
    """An entry of `op_db` and the cases that its samples make."""

    name: str
    cases: Callable[[Sample], Iterator[Case]]
    reference: bool = False  # the larger set of samples


OPERATORS = [
    Operator("nn.functional.linear", linear_cases),
    Operator("sigmoid", pointwise("sigmoid", epigemm.sigmoid, torch.sigmoid), reference=True),
    Operator(
        "nn.functional.relu",
        pointwise("bias_relu", lambda x: epigemm.bias_relu(x, None), torch.relu),
        reference=True,
    ),
    Operator("nn.functional.batch_norm", batch_norm_cases),
]
operators = pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)


def detached(case: Case) -> list[Tensor]:
    return [leaf.detach() for leaf in case.leaves]


@operators
@arithmetics
def test_forward(operator: Operator, arithmetic: Arithmetic) -> None:
    """Within the bound of its own arithmetic of the exact result; torch agrees on dtype, shape and what is exact."""
    ran = 0
    for sample in samples(operator.name, arithmetic.dtype, reference=operator.reference):
        for case in operator.cases(sample):
            leaves = [leaf.detach() for leaf in case.leaves]
            ours, theirs = case.ours(*leaves), case.theirs(*leaves)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            bounded = case.bound(arithmetic)
            reference.assert_within(ours, bounded)
            exact = case.theirs(*(leaf.double() for leaf in leaves))
            torch.testing.assert_close(bounded.expected, exact, equal_nan=True)
            ran += 1
    assert ran >= 6


@operators
def test_gradients(operator: Operator) -> None:
    """In float64, of every tensor, and with torch's operators behind ours in the graph."""
    ran = 0
    for sample in samples(operator.name, torch.float64, requires_grad=True):
        for case in operator.cases(sample):
            upstream = torch.randn_like(case.theirs(*case.leaves))
            ours, theirs = (
                torch.autograd.grad(call(*case.leaves), case.leaves, upstream)
                for call in (case.ours, case.theirs)
            )
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other)
            ran += 1
    assert ran >= 6
