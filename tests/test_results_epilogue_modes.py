"""Functions with several results under autograd, transforms, compilers, autocast and the batch-invariant mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from epigemm import ResultsEpilogue
from epigemm.epilogues.tracer.results import AMAX, AMIN, Result
from tests.support.results import (
    draw,
    every_reduction,
    gelu_and_product,
    in_fp32,
    late,
    statistics,
    wanted,
)


def test_gradients_of_ties(device: torch.device) -> None:
    """As torch's: shared evenly."""
    z = torch.tensor([[1.0, 3.0], [1.0, 2.0], [1.0, 3.0]], device=device, requires_grad=True)
    bias = torch.zeros(2, device=device)
    every_reduction.elementwise(z, bias)[4].sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [
        [pytest.approx(1 / 3), 0.5],
        [pytest.approx(1 / 3), 0.0],
        [pytest.approx(1 / 3), 0.5],
    ]


def are_decided(result: Result, matrix: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """1 where rounding the matrix that a result reduces leaves an element its gradient, else 0: of extremes alone.

    An extreme has the gradient of the element that it is. Two elements that differ by less than two roundings of each
    may become equal, and share it, or change places.
    """
    if result.kind not in (AMAX, AMIN):
        return torch.ones(shape, device=matrix.device)
    largest = (matrix if result.kind == AMAX else -matrix).topk(2, result.axis).values
    first, second = largest.unbind(result.axis)
    decided = first - second > 2 * torch.finfo(dtype).eps * first.abs()
    assert bool(decided.any())
    return decided.float().reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function", [gelu_and_product, statistics, in_fp32, late], ids=lambda f: f.traced.name
)
def test_gradients_are_those_of_plain_operators(
    function: ResultsEpilogue, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    given = draw(function, rng, dtype, device)
    leaves = given.leaves()
    got = tree_leaves(function(given.x, given.weight, *given.operands))
    wide = [each.detach().double().requires_grad_() for each in leaves]
    want = wanted(function, wide[0] @ wide[1].t(), wide[2:])
    # Extremes of these functions are of their first result, but for a constant.
    weights = [
        torch.randn(each.shape, generator=rng).to(device)
        * are_decided(result, want[0].detach(), dtype, each.shape)
        for each, result in zip(got, function.results, strict=True)
    ]
    sum((each * weight).sum() for each, weight in zip(got, weights, strict=True)).backward()
    sum((each * weight).sum() for each, weight in zip(want, weights, strict=True)).backward()  # type: ignore[union-attr]
    # Four roundings to 16 bits, each by eps / 2 at most: a result's gradient, the matrix it is computed from, the
    # gradient of the product, the leaf's. In fp32 also sums of up to 40 products.
    most = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for mine, other in zip(leaves, wide, strict=True):
        assert mine.grad is not None and other.grad is not None and mine.grad.dtype == dtype
        error = (mine.grad.double() - other.grad).norm() / other.grad.norm()
        assert float(error) < most


# --- batch invariance -------------------------------------------------------------------------------------------------
