"""KernelBench level 2, problems 33 and 39, the latter with a larger batch: bn((x @ weight.T + bias) * scale)."""

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
REAL_39 = Size(16384, 4096, 4096)
EARLIER = Size(128, 1024, 512)


class Model(nn.Module):
    """The original."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        result: Tensor = self.bn(self.gemm(x) * self.scale)
        return result


class ModelNew(nn.Module):
    """The same on epigemm.

    In eval mode all of it is one kernel. In training mode, which is what the public harness runs, BatchNorm
    uses the batch's own statistics: on a GPU three passes over the result compute all of it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] to [M, N]."""
        return epigemm.nn.linear_scale_batch_norm1d(x, self.gemm, self.scale, self.bn)


def get_inputs(size: Size = REAL) -> list[Tensor]:
    """The model's inputs."""
    return [torch.rand(size.batch_size, size.in_features)]


def get_init_inputs(size: Size = REAL) -> list[Any]:
    """The constructor's arguments."""
    return [size.in_features, size.out_features, (size.out_features,)]
