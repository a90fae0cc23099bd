"""A function that tests of several parts of the tracer share."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow, Scalar


def swish_clamp(
    acc: Tensor,
    bias: PerColumn,
    residual: Matrix,
    gain: PerRow,
    limit: Scalar = 6.0,
) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) * gain + residual
