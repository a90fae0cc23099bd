"""The batch-invariant mode on a CPU: a row of a call that autograd records has the bits of that row alone.

PyTorch's elementwise operators compute the last elements of a tensor by other instructions than the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.support.thorough import in_turn

Call = Callable[[Tensor, slice], Any]
SHAPES = ((33, 15, 33), (7, 19, 8), (5, 1, 3), (18, 40, 17))  # M, N, K


@epigemm.epilogue
def own(acc: Tensor, bias: epigemm.PerColumn) -> Tensor:
    return F.gelu(acc + bias) * torch.sigmoid(acc)


@epigemm.epilogue
def of_operands(
    acc: Tensor, row: epigemm.PerRow, other: epigemm.Matrix, scale: epigemm.Scalar = 2.0
) -> Tensor:
    return torch.tanh(acc * row) + F.silu(other) * scale


@epigemm.epilogue
def several(acc: Tensor, bias: epigemm.PerColumn) -> Any:
    z = F.gelu(acc + bias) * torch.sigmoid(acc)
    return z, torch.exp(-z * z), z.sum(1), z.amax(1)


class Chain(nn.Module):
    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(k, n, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        return F.gelu(z) * torch.sigmoid(z)


def calls(m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Call]:
    """Calls of x and of the rows of it that they are given."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=dtype)

    w, b, w2, b2, matrix, row, vector = (
        *(draw(n, k), draw(n), draw(n, k), draw(n)),
        *(draw(m, n), draw(m), draw(n).abs()),
    )
    layers = [
        kind(k, n, dtype=dtype)
        for kind in (epigemm.nn.LinearGELU, epigemm.nn.LinearGLU, epigemm.nn.LinearTanh)
    ]
    fused = epigemm.fuse(Chain(n, k, dtype))
    return {
        "own": lambda x, i: own(x, w, b),
        "of_operands": lambda x, i: of_operands(x, w, row[i], matrix[i]),
        "several": lambda x, i: several(x, w, b),
        "own.elementwise": lambda x, i: own.elementwise(matrix[i] * x[:, :1], b),
        "gated": lambda x, i: epigemm.linear_gated(x, w, b, gate=matrix[i], activation="gelu"),
        "residual": lambda x, i: epigemm.linear_residual(x, w, b, residual=matrix[i]),
        "layer_scale": lambda x, i: epigemm.linear_layer_scale_residual(x, w, b, vector, matrix[i]),
        "glu": lambda x, i: epigemm.linear_glu(x, w, b, weight2=w2, bias2=b2, activation="gelu"),
        "batch_norm_relu": lambda x, i: epigemm.linear_batch_norm_relu(x, w, b, vector, vector, b2, b),
        "linear": lambda x, i: epigemm.linear(x, w, b),
        "relu": lambda x, i: epigemm.linear_relu(x, w, b),
        "gelu": lambda x, i: epigemm.linear_gelu(x, w, b),
        "silu": lambda x, i: epigemm.linear_silu(x, w, b),
        "tanh": lambda x, i: epigemm.linear_tanh(x, w, b),
        "sigmoid_scale_residual": lambda x, i: epigemm.linear_sigmoid_scale_residual(x, w, b, scale=0.7),
        "relu_div": lambda x, i: epigemm.linear_relu_div(x, w, b, divisor=3.0),
        "scale": lambda x, i: epigemm.linear_scale(x, w, b, vector),
        "scale_batch_norm": lambda x, i: epigemm.linear_scale_batch_norm(x, w, b, vector, vector, vector),
        **{type(layer).__name__: lambda x, i, layer=layer: layer(x) for layer in layers},  # type: ignore[misc]
        "fused": lambda x, i: fused(x),
    }


def different_rows(call: Call, x: Tensor) -> list[int]:
    """The rows of a call whose bits are not those of the row alone."""

    def results(rows: slice) -> list[Tensor]:
        found = call(x[rows], rows)
        return list(found) if isinstance(found, tuple) else [found]

    with epigemm.batch_invariant():
        whole = results(slice(0, len(x)))
        alone = [results(slice(row, row + 1)) for row in range(len(x))]
    return [
        row
        for row, found in enumerate(alone)
        if any(not torch.equal(each[row : row + 1], one) for each, one in zip(whole, found, strict=True))
    ]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("dtype", "shape"), in_turn(DTYPES, SHAPES))
def test_a_row_has_the_bits_of_the_row_alone(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    x = torch.randn(m, k, dtype=dtype)
    every = calls(m, n, k, dtype)
    if dtype == torch.float64:
        del every["fused"]  # such chains stay PyTorch's
    for name, call in every.items():
        for is_recorded in (True, False):
            found = different_rows(call, x.clone().requires_grad_(is_recorded))
            assert not found, (name, is_recorded, found)
