"""Networks of coordinates, tables, text and sound that no kernel and no estimate was made for, in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.networks import RMSNorm, merged, split_heads


def frequencies(x: Tensor, count: int) -> Tensor:
    """NeRF's positional encoding: x, and sines and cosines of 2^0 x to 2^(count-1) x."""
    scaled = [x * 2.0**power for power in range(count)]
    return torch.cat([x, *(wave(each) for each in scaled for wave in (torch.sin, torch.cos))], dim=-1)


class NeRF(nn.Module):
    """Colour and density of points seen from directions; the points once more halfway (Mildenhall et al. 2020)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.points, self.directions, self.skip = 10, 4, layers // 2
        encoded, seen = 3 + 6 * self.points, 3 + 6 * self.directions
        inner = [width + encoded if i == self.skip + 1 else width for i in range(1, layers)]
        self.layers = nn.ModuleList(nn.Linear(k, width) for k in [encoded, *inner])
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + seen, width // 2), nn.Linear(width // 2, 3)

    def forward(self, points: Tensor, directions: Tensor) -> Tensor:
        """Two [B, 3] to [B, 4]."""
        encoded = frequencies(points, self.points)
        h = encoded
        for index, layer in enumerate(self.layers):
            h = F.relu(layer(h))
            if index == self.skip:
                h = torch.cat([encoded, h], dim=-1)
        seen = torch.cat([self.feature(h), frequencies(directions, self.directions)], dim=-1)
        colour = torch.sigmoid(self.colour(F.relu(self.view(seen))))
        return torch.cat([colour, F.relu(self.density(h))], dim=-1)


class SineLayer(nn.Module):
    """``sin(30 (x @ W.T + b))`` (Sitzmann et al. 2020)."""

    def __init__(self, k: int, n: int, *, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n)
        bound = 1 / k if is_first else math.sqrt(6 / k) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] to [..., n]."""
        return torch.sin(30 * self.linear(x))


def siren(width: int, layers: int) -> nn.Sequential:
    """Two coordinates to three colours: layers of sines, then a linear one."""
    first = SineLayer(2, width, is_first=True)
    sines = [SineLayer(width, width, is_first=False) for _ in range(layers - 1)]
    return nn.Sequential(first, *sines, nn.Linear(width, 3))


class TabularBlock(nn.Module):
    """``x + dropout(linear(dropout(relu(linear(batch_norm(x))))))`` (Gorishniy et al. 2021)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.BatchNorm1d(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to the same."""
        h = self.dropout(F.relu(self.up(self.norm(x))))
        result: Tensor = x + self.dropout(self.down(h))
        return result


def tabular_resnet(features: int, width: int, layers: int) -> nn.Sequential:
    """Features of rows to one number each."""
    blocks = [TabularBlock(width, 2 * width) for _ in range(layers)]
    return nn.Sequential(
        nn.Linear(features, width), *blocks, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)
    )


class OPTLayer(nn.Module):
    """Pre-LayerNorm, a scaled query, ReLU, biases (Zhang et al. 2022)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.scaling = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        h = self.norm1(x)
        q = split_heads(self.query(h) * self.scaling, self.heads)
        k, v = (split_heads(each(h), self.heads) for each in (self.key, self.value))
        h = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))
        x = x + self.dropout(self.proj(h))
        result: Tensor = x + self.dropout(self.down(F.relu(self.up(self.norm2(x)))))
        return result


class Positions(nn.Module):
    """Adds a learned vector to each position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        return x + self.weight[: x.shape[1]]


class Experts(nn.Module):
    """Each token through the best of several SwiGLU layers, by grouped products (Jiang et al. 2024)."""

    def __init__(self, width: int, hidden: int, experts: int, best: int) -> None:
        super().__init__()
        self.best, self.router = best, nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] to the same."""
        likely, chosen = (
            self.router(x).softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).topk(self.best)
        )
        likely = (likely / likely.sum(dim=-1, keepdim=True)).to(x.dtype)
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        gate, up = grouped(x[order // self.best], self.gate_up, ends).chunk(2, dim=-1)
        found = grouped(F.silu(gate) * up, self.down, ends)[order.argsort()]
        result: Tensor = (found.view(-1, self.best, x.shape[1]) * likely.unsqueeze(-1)).sum(dim=1)
        return result


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows, which ends where `ends` says, times the transpose of its own of the weights [G, N, K].

    Compilers take PyTorch's operator in bf16 alone. The other types take the way of Hugging Face's models: an
    operator of one's own, with a loop over the groups inside.
    """
    if rows.dtype == torch.bfloat16:
        product: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.10
        result: Tensor = product(rows, weights.transpose(-2, -1), offs=ends)
        return result
    found: Tensor = grouped_mm(rows, weights, ends)
    return found


def _groups(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.split(rows, sizes)


@torch.library.custom_op("benchmarks::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """See `grouped`."""
    groups = zip(_groups(rows, ends), weights, strict=True)
    return torch.cat([group @ weight.t() for group, weight in groups])


@torch.library.custom_op("benchmarks::grouped_mm_weights", mutates_args=())
def grouped_mm_weights(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the weights: a product for each group."""
    groups = zip(_groups(gradient, ends), _groups(rows, ends), strict=True)
    return torch.stack([of.t() @ group for of, group in groups])


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@grouped_mm_weights.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    of_rows: Tensor = grouped_mm(gradient, weights.transpose(-2, -1), ends)
    return of_rows, grouped_mm_weights(gradient, rows, ends), None


grouped_mm.register_autograd(_backward, setup_context=_keep)


class MixtralLayer(nn.Module):
    """RMSNorm, grouped heads, and experts in place of the MLP. The positions are left out."""

    def __init__(
        self, width: int, heads: int, groups: int, hidden: int, experts: int = 8, best: int = 2
    ) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * (width // heads), bias=False) for _ in range(2))
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.experts = Experts(width, hidden, experts, best)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        h, repeat = self.norm1(x), self.heads // self.groups
        q = split_heads(self.q(h), self.heads)
        k, v = (
            split_heads(each(h), self.groups).repeat_interleave(repeat, dim=1) for each in (self.k, self.v)
        )
        x = x + self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        result: Tensor = x + self.experts(self.norm2(x).flatten(0, 1)).view_as(x)
        return result


class Wav2Vec2Layer(nn.Module):
    """Post-LayerNorm, biases, GELU (Baevski et al. 2020)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        q, k, v = (split_heads(each(x), self.heads) for each in (self.query, self.key, self.value))
        h = self.dropout(self.proj(merged(F.scaled_dot_product_attention(q, k, v))))
        x = self.norm1(x + h)
        h = self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))
        result: Tensor = self.norm2(x + h)
        return result


class Wav2Vec2(nn.Module):
    """Samples of sound through convolutions, positions by one more, layers."""

    _STRIDES = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))  # (kernel, stride)

    def __init__(
        self, channels: int, width: int, layers: list[Any], *, reach: int = 128, groups: int = 16
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels if i else 1, channels, kernel, stride, bias=False)
            for i, (kernel, stride) in enumerate(self._STRIDES)
        )
        self.first_norm, self.norm = nn.GroupNorm(channels, channels), nn.LayerNorm(channels)
        self.project = nn.Linear(channels, width)
        self.positions = nn.Conv1d(width, width, reach, padding=reach // 2, groups=groups)
        self.layers, self.last_norm = nn.Sequential(*layers), nn.LayerNorm(width)

    def forward(self, sound: Tensor) -> Tensor:
        """[B, samples] to [B, T, width]."""
        x = sound.unsqueeze(1)
        for index, convolution in enumerate(self.convolutions):
            x = convolution(x)
            x = F.gelu(x if index else self.first_norm(x))
        x = self.project(self.norm(x.transpose(1, 2)))
        near = F.gelu(self.positions(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        result: Tensor = self.layers(self.last_norm(x + near))
        return result
