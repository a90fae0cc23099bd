"""Networks in plain PyTorch, as their published sources write them. Nothing here knows of epigemm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * size] to [B, heads, T, size]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[B, heads, T, size] to [B, T, heads * size]."""
    return x.transpose(1, 2).flatten(2)


class BertLayer(nn.Module):
    """Post-LayerNorm, biases, dropout before each residual sum (Devlin et al. 2018)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        q, k, v = (split_heads(each(x), self.heads) for each in (self.query, self.key, self.value))
        h = self.proj(merged(F.scaled_dot_product_attention(q, k, v)))
        x = self.norm1(self.dropout(h) + x)
        result: Tensor = self.norm2(self.dropout(self.down(F.gelu(self.up(x)))) + x)
        return result


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is [in, out]."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) * 0.02), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Layer(nn.Module):
    """Pre-LayerNorm, Conv1D, tanh GELU (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.attn, self.proj = heads, Conv1D(width, 3 * width), Conv1D(width, width)
        self.up, self.down = Conv1D(width, hidden), Conv1D(hidden, width)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        q, k, v = (split_heads(each, self.heads) for each in self.attn(self.norm1(x)).chunk(3, dim=-1))
        x = self.dropout(self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))) + x
        h = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        result: Tensor = x + self.dropout(self.down(h))
        return result


class ViTLayer(nn.Module):
    """Pre-LayerNorm, one product for q, k and v, GELU (Dosovitskiy et al. 2020)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        q, k, v = (split_heads(each, self.heads) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(merged(F.scaled_dot_product_attention(q, k, v)))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class MixerLayer(nn.Module):
    """An MLP over tokens and one over channels (Tolstikhin et al. 2021)."""

    def __init__(self, width: int, tokens: int, token_hidden: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens)
        )
        self.channels = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm2(x))
        return result


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` in fp32, as Llama and T5 compute it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaLayer(nn.Module):
    """RMSNorm, rotary positions, grouped heads, SwiGLU, no biases (Touvron et al. 2023)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, groups: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q, self.proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        angles = torch.outer(torch.arange(length).float(), 1e4 ** -(torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def rotated(self, x: Tensor) -> Tensor:
        """Rotary positions."""
        low, high = x.chunk(2, dim=-1)
        t = x.shape[2]
        return x * self.cos[:t] + torch.cat((-high, low), dim=-1) * self.sin[:t]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        h = self.norm1(x)
        q, k = (
            self.rotated(split_heads(self.q(h), self.heads)),
            self.rotated(split_heads(self.k(h), self.groups)),
        )
        v, repeat = split_heads(self.v(h), self.groups), self.heads // self.groups
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        x = x + self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        h = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class T5Layer(nn.Module):
    """An encoder layer: RMSNorm, a bias of positions, ReLU, no biases, no scale (Raffel et al. 2019)."""

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2, self.dropout = RMSNorm(width), RMSNorm(width), nn.Dropout(0.0)
        self.positions = nn.Parameter(torch.randn(1, heads, length, length) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        h = self.norm1(x)
        q, k, v = (split_heads(each(h), self.heads) for each in (self.q, self.k, self.v))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + self.positions
        x = x + self.dropout(self.proj(merged(scores.softmax(dim=-1) @ v)))
        result: Tensor = x + self.dropout(self.down(self.dropout(F.relu(self.up(self.norm2(x))))))
        return result


class ResidualBlock(nn.Module):
    """``x + down(relu(up(x)))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        result: Tensor = x + self.down(F.relu(self.up(x)))
        return result


class Tokens(nn.Sequential):
    """Embedded tokens, layers, a last norm."""

    def __init__(self, words: int, width: int, layers: list[Any], norm: nn.Module) -> None:
        super().__init__(nn.Embedding(words, width), *layers, norm)


class Images(nn.Module):
    """Patches of 16 x 16, layers, the mean of the tokens, a head."""

    def __init__(self, width: int, layers: list[Any]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.layers, self.norm, self.head = (
            nn.Sequential(*layers),
            nn.LayerNorm(width),
            nn.Linear(width, 1000),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, 1000]."""
        x = self.layers(self.patches(images).flatten(2).transpose(1, 2))
        result: Tensor = self.head(self.norm(x).mean(dim=1))
        return result


class DLRM(nn.Module):
    """Embedding bags and a bottom MLP, dot products of all pairs, a top MLP (Naumov et al. 2019)."""

    rows: Tensor
    columns: Tensor

    def __init__(self, tables: int, entries: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> None:
        super().__init__()
        self.bottom = mlp(13, *bottom)
        self.tables = nn.ModuleList(nn.EmbeddingBag(entries, bottom[-1], mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(bottom[-1] ** -0.5), bottom[-1] ** -0.5)  # type: ignore[arg-type]
        rows, columns = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        self.top, self.last = mlp(len(rows) + bottom[-1], *top), nn.Linear(top[-1], 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Numbers [B, 13] and indices [B, tables, bag] to probabilities [B, 1]."""
        low = self.bottom(dense)
        vectors = torch.stack([low] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], dim=1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.last(self.top(torch.cat([low, pairs], dim=1))))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers, each with a ReLU; He's initialisation keeps the scale of values."""
    layers: list[nn.Module] = []
    for k, n in pairwise(widths):
        layers += [nn.Linear(k, n), nn.ReLU(inplace=True)]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
    return nn.Sequential(*layers)
