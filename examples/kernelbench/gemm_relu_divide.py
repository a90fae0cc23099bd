"""KernelBench level 2, problem 63: relu(x @ weight.T + bias) / divisor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import epigemm


class Size(NamedTuple):
    """One size of the problem."""

    batch_size: int
    in_features: int
    out_features: int


REAL = Size(1024, 8192, 8192)
EARLIER = Size(128, 1024, 512)
DIVISOR = 2.0


class Model(nn.Module):
    """The original."""

    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return torch.relu(self.linear(x)) / self.divisor


class ModelNew(nn.Module):
    """The same on epigemm: product, bias, ReLU and division in one kernel."""

    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return epigemm.linear_relu_div(x, self.linear.weight, self.linear.bias, self.divisor)


def get_inputs(size: Size = REAL) -> list[Tensor]:
    """The model's inputs."""
    return [torch.rand(size.batch_size, size.in_features)]


def get_init_inputs(size: Size = REAL) -> list[Any]:
    """The constructor's arguments."""
    return [size.in_features, size.out_features, DIVISOR]
