"""Random operands of a built-in epilogue, for tests and tools."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epigemm.epilogues.kinds import PER_COLUMN
from epigemm.epilogues.registry import Epilogue, compute_dtype, dtype_of


class EpilogueInputs(NamedTuple):
    """What an epilogue reads beside the accumulator, in the order of the operator's arguments."""

    bias: Tensor | None
    operands: list[Tensor]
    scalars: list[float]


def sample_inputs(
    epilogue: Epilogue,
    columns: int,  # N, the length of every per-column vector
    dtype: torch.dtype,  # the element type of x
    # where the tensors live; the numbers are drawn on the CPU, so they are the same everywhere
    device: torch.device | str = "cpu",
    *,
    generator: torch.Generator | None = None,  # a CPU generator; the default one if None
    scalar_as_tensor: bool = False,  # True gives the scalar as a 0-d tensor instead of a number
) -> EpilogueInputs:
    """Operands with both signs."""

    def draw(*shape: int, of: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=of)

    bias = draw(columns, of=dtype) if epilogue.bias_place else None
    places = enumerate(epilogue.operands, 1)
    vectors = [each for place, each in places if each.kind == PER_COLUMN and place != epilogue.bias_place]
    operands = [draw(columns, of=dtype_of(vector, dtype)) for vector in vectors]
    if not epilogue.has_scalar:
        return EpilogueInputs(bias, operands, [])
    # Away from zero: a divisor near zero would make every comparison one of rounding errors.
    number = torch.randn((), generator=generator, dtype=torch.float64)
    number = torch.where(number < 0, number - 0.5, number + 0.5)
    if scalar_as_tensor:
        return EpilogueInputs(bias, [*operands, number.to(device, compute_dtype(dtype))], [])
    return EpilogueInputs(bias, operands, [float(number)])
