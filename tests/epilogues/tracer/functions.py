"""A function that tests of several parts of the tracer share, and operands for it."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.kinds import Matrix, Operand, PerColumn, PerRow, Scalar


def swish_clamp(
    acc: Tensor,
    bias: PerColumn,
    residual: Matrix,
    gain: PerRow,
    limit: Scalar = 6.0,
) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) * gain + residual


def draw(operand: Operand, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    shape = {"per_column": (columns,), "per_row": (rows, 1), "scalar": (), "matrix": (rows, columns)}[
        operand.kind
    ]
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(traced: Traced, rows: int = 6, columns: int = 9) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    acc = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return acc, [draw(operand, rows, columns, generator) for operand in traced.operands]
