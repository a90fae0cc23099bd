"""Some public functions by the rows of `tests/ops/table.py`: what a user replaces by them, and random arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import epigemm
from tests.ops.op import COLUMN, NUMBER, VARIANCE, Op
from tests.ops.op import Arguments as Arguments
from tests.ops.op import map_tensors as map_tensors
from tests.ops.op import tensors_of as tensors_of
from tests.ops.table import FUNCTIONS


@dataclass(frozen=True)
class Public:
    """`eager(**arguments)` is what `call(**arguments)` promises to compute."""

    op: Op

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def call(self) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(epigemm, self.name)
        return function

    @property
    def eager(self) -> Callable[..., Tensor]:
        return self.op.reference

    @property
    def vectors(self) -> tuple[str, ...]:
        """Arguments of length N, in the dtype of x."""
        return tuple(self.op.of_kind(COLUMN, VARIANCE))

    @property
    def scalar(self) -> str:
        """An argument that is a number or a 0-d tensor."""
        return next(iter(self.op.of_kind(NUMBER)), "")

    @property
    def is_linear(self) -> bool:
        return self.op.is_linear

    def draw(
        self,
        rng: torch.Generator,
        *,
        shape: tuple[int, int, int] = (9, 16, 24),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tensor_scalar: bool = False,
    ) -> dict[str, Any]:
        """Random arguments; x is M x K for a linear function, else M x N."""
        m, n, k = shape
        return self.op.draw(rng, (m,), n, k, dtype=dtype, device=device, tensor_numbers=tensor_scalar)


_ROWS = {op.name: op for op in FUNCTIONS}
PUBLIC = [
    Public(_ROWS[name])
    for name in (
        *(
            "linear",
            "linear_relu",
            "linear_sigmoid_scale_residual",
            "linear_scale",
            "linear_scale_batch_norm",
        ),
        *(
            "linear_relu_div",
            "sigmoid",
            "bias_relu",
            "sigmoid_scale_residual",
            "scale_batch_norm",
            "relu_div",
        ),
    )
]
PUBLIC_LINEAR = [function for function in PUBLIC if function.is_linear]
PUBLIC_ELEMENTWISE = [function for function in PUBLIC if not function.is_linear]
