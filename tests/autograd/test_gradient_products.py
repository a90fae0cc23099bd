"""The matrix products of a backward pass, and the accumulator that an epilogue's derivative reads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from epigemm.arguments.precision import DEFAULT
from epigemm.autograd.gradient_products import accumulator, product_gradients, rows_of, runs_directly
from epigemm.packs.weight_packs import FIND

NEEDS = [(a, b, c) for a, b, c in product([False, True], repeat=3)]


@pytest.mark.parametrize("lead", [(6,), (), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("records", [False, True], ids=["once", "twice"])
def test_gradients_are_autograds(lead: tuple[int, ...], records: bool, rng: torch.Generator) -> None:
    """Also where the backward pass is recorded itself."""
    x = torch.randn(*lead, 8, generator=rng, dtype=torch.float64).requires_grad_()
    weight = torch.randn(5, 8, generator=rng, dtype=torch.float64).requires_grad_()
    bias = torch.randn(5, generator=rng, dtype=torch.float64).requires_grad_()
    grad = torch.randn(*lead, 5, generator=rng, dtype=torch.float64)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), grad)
    for needs in NEEDS:
        with torch.set_grad_enabled(records):
            found = product_gradients(grad, x, weight, *needs, DEFAULT)
        assert [each is not None for each in found] == list(needs)
        for mine, other in zip(found, expected, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, other)
                assert mine.requires_grad == (records and mine is not found[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_accumulator_is_not_rounded(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """A small sum beside large terms, and one beyond fp16."""
    x = torch.randn(2, 3, 64, generator=rng).to(device, dtype)
    weight = torch.randn(5, 64, generator=rng).to(device, dtype)
    x[0, 0], weight[0] = 255.0, 255.0
    found = accumulator(x, weight, DEFAULT, FIND)
    exact = x.double() @ weight.double().t()
    assert found.dtype is torch.float32 and float(exact[0, 0, 0]) > 65504
    bound = 64 * 2.0**-23 * (x.double().abs() @ weight.double().abs().t())
    assert bool(((found.double() - exact).abs() <= bound).all())


def test_the_accumulator_of_wide_types(rng: torch.Generator) -> None:
    x, weight = (torch.randn(size, generator=rng, dtype=torch.float64) for size in ((3, 2, 8), (5, 8)))
    torch.testing.assert_close(accumulator(x, weight, DEFAULT, FIND), x @ weight.t())
    x.requires_grad_()
    found = accumulator(x, weight, DEFAULT, FIND)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand_as(x))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 0, 4), (2, 2, 2, 4)])
def test_rows(shape: tuple[int, ...]) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    assert torch.equal(rows_of(x), x.reshape(-1, 4))


def test_what_traces_or_batches_does_not_run_directly() -> None:
    x, seen = torch.ones(3), list[bool]()

    def look(tensor: Tensor) -> Tensor:
        seen.append(runs_directly(tensor, None))
        return tensor * 1

    look(x)
    torch.vmap(look)(x)
    torch.func.functionalize(look)(x)
    assert seen == [True, False, False]
