"""The models of the public problem set that fusion began with, as that set writes them (KernelBench level 1 and 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """What a linear layer maps to what."""

    in_features: int
    out_features: int


class GemmAddReLU(nn.Module):
    """Problem 2/76: ``relu(x @ weight.T + bias)``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return torch.relu(self.gemm(x) + self.bias)


class GemmSigmoidScalingResidualAdd(nn.Module):
    """Problem 2/70: ``sigmoid(z) * scaling_factor + z``."""

    def __init__(self, in_features: int, out_features: int, scaling_factor: float = 2.0) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        x = self.gemm(x)
        original_x = x
        x = torch.sigmoid(x)
        x = x * self.scaling_factor
        return x + original_x


class GemmScaleBatchNorm(nn.Module):
    """Problems 2/33 and 2/39: ``bn(z * scale)``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features, eps=1e-5, momentum=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        result: Tensor = self.bn(self.gemm(x) * self.scale)
        return result


class GemmReLUDivide(nn.Module):
    """Problem 2/63: ``relu(z) / divisor``."""

    def __init__(self, in_features: int, out_features: int, divisor: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return torch.relu(self.linear(x)) / self.divisor


class Sigmoid(nn.Module):
    """Problem 1/21: no linear layer, and so nothing to fuse; a model that must not become slower."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.sigmoid(x)
