"""Reductions by PyTorch's operators in the fixed order of the batch-invariant mode. Their values: tests/ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epigemm.calls import reductions
from epigemm.epilogues.tracer.results import AMAX, AMIN, REDUCTIONS
from tests.support.invariance import bits
from tests.support.threads import threads


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_values_in_the_mode(kind: str, rng: torch.Generator) -> None:
    """And their first and second derivatives."""
    matrix = torch.randn(4, 7, generator=rng, dtype=torch.float64, requires_grad=True)

    def call(matrix: torch.Tensor) -> torch.Tensor:
        return reductions.reduce(matrix, kind, 1, correction=1.0, invariant=True)[0]

    torch.testing.assert_close(call(matrix), getattr(matrix, kind)(1))
    assert torch.autograd.gradcheck(call, matrix) and torch.autograd.gradgradcheck(call, matrix)


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
