"""Reductions by PyTorch's operators: types, accuracy, and the fixed order of the batch-invariant mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from epigemm.calls import reductions
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, REDUCTIONS, SUM, VAR
from tests.support.invariance import bits
from tests.support.threads import threads

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wanted(matrix: Tensor, kind: str, axis: int) -> Tensor:
    wide = matrix.double()
    if kind == VAR:
        return wide.var(axis, correction=1)
    found: Tensor = getattr(wide, kind)(axis)
    return found


@pytest.mark.every(7)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(5, 7), (64, 1), (3, 129)], ids=str)
def test_values(
    size: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    axis: int,
    invariant: bool,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    matrix = torch.randn(size, generator=rng).to(device, dtype)
    found, mean = reductions.reduce(matrix, kind, axis, correction=1.0, invariant=invariant)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        found.double(), wanted(matrix, kind, axis), rtol=1e-5, atol=1e-5, equal_nan=True
    )
    assert (mean is not None) == (kind == VAR)
    if mean is not None:
        torch.testing.assert_close(mean.double(), matrix.double().mean(axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_gradients(kind: str, rng: torch.Generator) -> None:
    matrix = torch.randn(4, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    for axis, invariant in ((0, False), (1, False), (1, True)):

        def call(matrix: Tensor, axis: int = axis, invariant: bool = invariant) -> tuple[Tensor, ...]:
            every = reductions.reduce(matrix, kind, axis, correction=0.0, invariant=invariant)
            return tuple(each for each in every if each is not None)

        assert torch.autograd.gradcheck(call, matrix)
        assert torch.autograd.gradgradcheck(call, matrix)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """They share out a long sum where there is one row alone, else the rows."""
    with threads(2):
        yield


@pytest.mark.parametrize("size", [(600, 1000), (8, 300000)], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_the_sum_of_a_row_depends_on_no_other(
    size: tuple[int, int], device: torch.device, rng: torch.Generator
) -> None:
    matrix = torch.randn(size, generator=rng).to(device)
    for kind in REDUCTIONS:
        together, _ = reductions.reduce(matrix, kind, 1, correction=0.0, invariant=True)
        for rows in (slice(0, 1), slice(3, 4), slice(4, 7), slice(100, 350)):
            alone, _ = reductions.reduce(matrix[rows].clone(), kind, 1, correction=0.0, invariant=True)
            assert torch.equal(bits(alone), bits(together[rows])), kind


def test_zeros_in_a_fixed_order() -> None:
    """The larger of 0 and -0 is either to torch: in the mode 0."""
    for row in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]):
        for kind in (AMAX, AMIN):
            found, _ = reductions.reduce(torch.tensor([row]), kind, 1, correction=0.0, invariant=True)
            assert torch.equal(bits(found), torch.zeros(1, dtype=torch.int32))


def test_of_nothing() -> None:
    for shape, axis in (((3, 0), 1), ((0, 3), 0)):
        for invariant in (False, True):
            matrix = torch.empty(shape)
            assert torch.equal(
                reductions.reduce(matrix, SUM, axis, correction=0.0, invariant=invariant)[0], torch.zeros(3)
            )
            mean, _ = reductions.reduce(matrix, MEAN, axis, correction=0.0, invariant=invariant)
            assert bool(mean.isnan().all()) and mean.shape == (3,)


def test_what_runs() -> None:
    launches = reductions.launches
    assert launches(SUM, torch.bfloat16, invariant=False) == ["sum"]
    assert launches(AMAX, torch.bfloat16, invariant=False) == ["amax", "cast to float32"]
    assert launches(VAR, torch.float16, invariant=False) == ["cast to float32", "var_mean"]
    assert launches(VAR, torch.float64, invariant=False) == ["var_mean"]
    (text,) = launches(MEAN, torch.float32, invariant=True)
    assert text.startswith("mean, as sums of two numbers")
    assert launches(AMIN, torch.float32, invariant=True) == ["amin"]
