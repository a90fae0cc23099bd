"""KernelBench level 1, problem 21: sigmoid(x)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import epigemm


class Size(NamedTuple):
    """One size of the problem."""

    batch_size: int
    dim: int


REAL = Size(4096, 393216)
EARLIER = Size(16, 16384)


class Model(nn.Module):
    """The original."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.sigmoid(x)


class ModelNew(nn.Module):
    """The same on epigemm."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return epigemm.sigmoid(x)


def get_inputs(size: Size = REAL) -> list[Tensor]:
    """The model's inputs."""
    return [torch.rand(size.batch_size, size.dim)]


def get_init_inputs(size: Size = REAL) -> list[Any]:
    """The constructor's arguments."""
    return []
