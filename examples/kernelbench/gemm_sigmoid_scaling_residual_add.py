"""KernelBench level 2, problem 70: z + scaling_factor * sigmoid(z),  z = x @ weight.T + bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import epigemm


class Size(NamedTuple):
    """One size of the problem."""

    batch_size: int
    input_size: int
    hidden_size: int


REAL = Size(1024, 8192, 8192)
EARLIER = Size(128, 1024, 512)
SCALING_FACTOR = 2.0


class Model(nn.Module):
    """The original."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.gemm = nn.Linear(input_size, hidden_size)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        z: Tensor = self.gemm(x)
        return torch.sigmoid(z) * self.scaling_factor + z


class ModelNew(nn.Module):
    """The same on epigemm: product, bias, sigmoid, scale and residual in one kernel."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.gemm = nn.Linear(input_size, hidden_size)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return epigemm.linear_sigmoid_scale_residual(x, self.gemm.weight, self.gemm.bias, self.scaling_factor)


def get_inputs(size: Size = REAL) -> list[Tensor]:
    """The model's inputs."""
    return [torch.rand(size.batch_size, size.input_size)]


def get_init_inputs(size: Size = REAL) -> list[Any]:
    """The constructor's arguments."""
    return [size.input_size, size.hidden_size, SCALING_FACTOR]
