"""Gated layers, whose product is read by halves: those that are made two products, and those that stay one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K, N = 8, 10
"""Columns of x, and of the result."""


class Layers(nn.Module):
    """One layer of two halves, and one behind it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc, self.down = nn.Linear(K, 2 * N, bias), nn.Linear(N, 2 * N)
        self.matrix = nn.Parameter(torch.randn(K, 2 * N))


def chunk(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, dim=-1)
    return F.silu(a) * b


def gate_behind(self: Any, x: Tensor) -> Any:
    """As diffusers' GEGLU."""
    a, gate = torch.chunk(self.fc(x), 2, -1)
    return a * F.gelu(gate)


def split(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).split(N, -1)
    return F.gelu(a, approximate="tanh") * b


def tensor_split(self: Any, x: Tensor) -> Any:
    a, b = torch.tensor_split(self.fc(x), 2, -1)
    return b * torch.sigmoid(a)


def sliced(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return torch.tanh(z[..., :N]) * z[..., N:]


def sliced_twice(self: Any, x: Tensor) -> Any:
    """SiLU as models spell it, each time with a view of its own."""
    z = self.fc(x)
    return z[..., :N] * torch.sigmoid(z[..., :N]) * z[..., N:]


def narrow(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return F.relu(z.narrow(-1, N, N)) * z.narrow(-1, 0, N)


def unflatten(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).unflatten(-1, (2, N)).unbind(-2)
    return F.silu(a) * b


def glu(self: Any, x: Tensor) -> Any:
    return F.glu(self.fc(x))


def glu_of_an_axis(self: Any, x: Tensor) -> Any:
    return F.glu(self.fc(x), x.dim() - 1) + 1


def by_transpose(self: Any, x: Tensor) -> Any:
    a, b = (x @ self.fc.weight.t()).chunk(2, -1)
    return F.silu(a) * b


def bilinear(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    return a * b


def clamped(self: Any, x: Tensor) -> Any:
    """As gpt-oss has it, but for which columns are which."""
    a, b = self.fc(x).chunk(2, -1)
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
    return (b + 1) * (a * torch.sigmoid(1.702 * a))


def viewed(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    return F.silu(a.view(-1, N)) * b.view(-1, N)


def residual(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    return F.dropout(F.silu(a) * b, 0.5, False) + x[..., :1]


def sampled(self: Any, x: Tensor) -> Any:
    """As of a variational autoencoder."""
    mean, logarithm = self.fc(x).chunk(2, -1)
    return mean + torch.exp(0.5 * logarithm)


def stacked(self: Any, x: Tensor) -> Any:
    return F.glu(self.down(F.glu(self.fc(x), -1)), -1)


TAKEN: list[Callable[..., Any]] = [
    *(chunk, gate_behind, split, tensor_split, sliced, sliced_twice, narrow, unflatten, glu, glu_of_an_axis),
    *(by_transpose, bilinear, clamped, viewed, residual, sampled),
]


def returned(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    a, b = z.chunk(2, -1)
    return F.silu(a) * b, z


def half_returned(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    return F.silu(a) * b, b


def read_as_a_whole(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    a, b = z.chunk(2, -1)
    return F.silu(a) * b + z.sum()


def half_is_summed(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    return F.silu(a) * b * a.sum(-1, keepdim=True)


def copied(self: Any, x: Tensor) -> Any:
    """A view of the whole product, but of its halves a copy."""
    a, b = self.fc(x).chunk(2, -1)
    return F.silu(a.reshape(-1)) * b.reshape(-1)


def written(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, -1)
    seen = a.view(a.shape)
    a.mul_(2)
    return seen * b


def silu_in_place(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return F.silu(z[..., :N], inplace=True) * z[..., N:]


def not_multiplied(self: Any, x: Tensor) -> Any:
    key, value = self.fc(x).chunk(2, -1)
    return F.softmax(key, -1), value.relu()


def other_columns(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return F.silu(z[..., 1 : N + 1]) * z[..., :N]


def interleaved(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return F.silu(z[..., ::2]) * z[..., 1::2]


def of_rows(self: Any, x: Tensor) -> Any:
    a, b = self.fc(x).chunk(2, 0)
    return F.silu(a) * b


def glu_of_rows(self: Any, x: Tensor) -> Any:
    return F.glu(self.fc(x), 0)


def two_glus(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    return F.glu(z, -1) + F.glu(z, -1)


def glu_and_chunk(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    a, b = z.chunk(2, -1)
    return F.glu(z, -1) + a * b


def one_half(self: Any, x: Tensor) -> Any:
    return F.silu(self.fc(x)[..., :N]) * x[..., :1]


def as_it_stands(self: Any, x: Tensor) -> Any:
    """`[K, 2N]`, as GPT-2 has its weights: halves of its columns are none of its rows."""
    a, b = (x @ self.matrix).chunk(2, -1)
    return F.silu(a) * b


LEFT: list[Callable[..., Any]] = [
    *(returned, half_returned, read_as_a_whole, half_is_summed, copied, written, silu_in_place),
    *(
        not_multiplied,
        other_columns,
        interleaved,
        of_rows,
        glu_of_rows,
        two_glus,
        glu_and_chunk,
        one_half,
        as_it_stands,
    ),
]
