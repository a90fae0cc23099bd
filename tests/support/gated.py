"""Pairs of products of one x: random ones, their exact values, and the allowed errors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.activations import ACT

_STEEPEST = 1.2
"""Of all activations' slopes: GELU's reach 1.13, SiLU's 1.10."""
_OF_ACTIVATION = 8
"""Units in the last place of the epilogue's arithmetic that an activation may be off."""


class Pair(NamedTuple):
    """Two weights, each with a bias or without one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    weight2: Tensor
    bias2: Tensor | None

    @property
    def whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, one weight with the rows of both, and its bias."""
        both = None if self.bias is None or self.bias2 is None else torch.cat((self.bias, self.bias2))
        return self.x, torch.cat((self.weight, self.weight2)), both


def draw(
    lead: tuple[int, ...],
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    device: torch.device | str = "cpu",
) -> Pair:
    """Numbers of the order of one in all products."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    weights = [normal(n, k) / max(k, 1) ** 0.5 for _ in range(2)]
    biases = [normal(n) if bias else None for _ in range(2)]
    given = (normal(*lead, k), weights[0], biases[0], weights[1], biases[1])
    return Pair(*(None if each is None else each.to(device, dtype) for each in given))  # type: ignore[arg-type]


def exact(pair: Pair, activation: str) -> Tensor:
    """The pair's result in fp64."""
    first, second, _, _ = _products(pair)
    return ACT[activation](first) * second


def bound(pair: Pair, activation: str) -> Tensor:
    """How far a result may be off, element by element.

    A product of K terms is summed in fp32 (fp64 for fp64) and rounded to the tensors' type, as its result between two
    kernels is. An error of the first one goes through the activation; both are multiplied by the other factor. The
    result is rounded once.
    """
    dtype, k = pair.x.dtype, pair.x.shape[-1]
    unit = torch.finfo(dtype).eps / 2
    of_sums = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps / 2
    first, second, first_size, second_size = _products(pair)
    first_error = unit * first.abs() + (k + 2) * of_sums * first_size
    second_error = unit * second.abs() + (k + 2) * of_sums * second_size
    activated = ACT[activation](first)
    of_first = _STEEPEST * first_error + _OF_ACTIVATION * of_sums * (activated.abs() + 1)
    error = of_first * (second.abs() + second_error) + activated.abs() * second_error
    return 1.01 * error + (unit + of_sums) * (activated * second).abs() + torch.finfo(dtype).tiny


def assert_right(actual: Tensor, pair: Pair, activation: str) -> None:
    """That a result is of the pair's type and shape, and within the bound."""
    assert actual.dtype is pair.x.dtype and actual.shape == (*pair.x.shape[:-1], pair.weight.shape[0])
    error, allowed = (actual.detach().double() - exact(pair, activation)).abs(), bound(pair, activation)
    assert bool((error <= allowed).all()), f"{float((error / allowed).max()):.2f} times the bound"


def _products(pair: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both products in fp64, and the sums of their terms' sizes."""
    x, weight, bias, weight2, bias2 = (None if each is None else each.detach().double() for each in pair)
    assert x is not None and weight is not None and weight2 is not None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = x @ weight.t()
        return found if bias is None else found + bias

    sizes = [
        product(x.abs(), each.abs(), None if vector is None else vector.abs())
        for each, vector in ((weight, bias), (weight2, bias2))
    ]
    return product(x, weight, bias), product(x, weight2, bias2), sizes[0], sizes[1]
