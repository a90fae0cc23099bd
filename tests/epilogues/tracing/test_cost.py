"""How long functors are to the planner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaring import trace
from epigemm.epilogues.kinds import PerColumn, PerRow, Scalar


def plain(acc: Tensor, bias: PerColumn) -> Tensor:
    return torch.relu(acc + bias) ** 2


def sigmoid(acc: Tensor, bias: PerColumn) -> Tensor:
    return torch.sigmoid(acc + bias)


def gelu(acc: Tensor) -> Tensor:
    return F.gelu(acc)


def both(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc) * torch.exp(bias)


def by_row(acc: Tensor, row: PerRow) -> Tensor:
    return acc / row


def by_scalar(acc: Tensor, scale: Scalar) -> Tensor:
    return acc / scale


def of_scalars(acc: Tensor, a: Scalar, b: Scalar) -> Tensor:
    scale: float = (a / b) ** 3.5
    return acc * scale


def root(acc: Tensor) -> Tensor:
    return torch.pow(acc, 0.5)


def power(acc: Tensor, exponent: Scalar) -> Tensor:
    return torch.pow(acc, exponent)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, 0),
        (sigmoid, 2),
        (gelu, 4),
        (both, 5),
        (by_row, 1),
        (by_scalar, 0),
        (of_scalars, 0),
        (root, 1),
        (power, 10),
    ],
)
def test_special_functions(function: Callable[..., Tensor], expected: int) -> None:
    assert trace(function).special_functions == expected
