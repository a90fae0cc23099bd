"""Networks in plain PyTorch, as people write them: nothing here knows of epigemm."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLPSize(NamedTuple):
    """Layers of the same width."""

    layers: int
    width: int


class MLP(nn.Sequential):
    """Linear layers, BatchNorm if asked for, ReLU. He's initialisation: values keep their scale through all layers."""

    def __init__(self, layers: int, width: int, batch_norm: bool = False) -> None:
        modules: list[nn.Module] = []
        for _ in range(layers):
            linear = nn.Linear(width, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            modules += [linear, *([nn.BatchNorm1d(width)] if batch_norm else []), nn.ReLU()]
        super().__init__(*modules)


class ResMLPSize(NamedTuple):
    """Blocks, their width, and how many times as wide the layer inside is."""

    blocks: int
    width: int
    expansion: int


class ResidualBlock(nn.Module):
    """``x + fc2(relu(fc1(x)))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        h: Tensor = self.fc2(F.relu(self.fc1(x)))
        return x + h


class ResMLP(nn.Sequential):
    """A stack of residual blocks."""

    def __init__(self, blocks: int, width: int, expansion: int) -> None:
        super().__init__(*(ResidualBlock(width, expansion * width) for _ in range(blocks)))


class DLRMSize(NamedTuple):
    """A recommendation model's sizes.

    Attributes:
        dense: numbers among the features.
        tables: features that are categories, each with a table.
        rows: of each table.
        bag: entries of a category feature, whose vectors are added up.
        bottom: widths of the MLP over the numbers; the last one is the vectors' length.
        top: widths of the MLP at the end.
    """

    dense: int
    tables: int
    rows: int
    bag: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


class DLRM(nn.Module):
    """Embedding bags and a bottom MLP, the dot products of each pair of their vectors, a top MLP, a probability."""

    pair_rows: Tensor
    pair_columns: Tensor

    def __init__(self, size: DLRMSize) -> None:
        super().__init__()
        width = size.bottom[-1]
        self.bottom = self.mlp(size.dense, *size.bottom)
        self.tables = nn.ModuleList(self.table(size.rows, width) for _ in range(size.tables))
        rows, columns = torch.tril_indices(size.tables + 1, size.tables + 1, offset=-1)
        self.register_buffer("pair_rows", rows)
        self.register_buffer("pair_columns", columns)
        self.top = self.mlp(len(rows) + width, *size.top)
        self.last = nn.Linear(size.top[-1], 1)

    @staticmethod
    def table(rows: int, width: int) -> nn.EmbeddingBag:
        """Vectors of a length below one, as training starts with."""
        table = nn.EmbeddingBag(rows, width, mode="sum")
        nn.init.uniform_(table.weight, -(width**-0.5), width**-0.5)
        return table

    @staticmethod
    def mlp(*widths: int) -> nn.Sequential:
        """Linear layers, each with a ReLU."""
        layers: list[nn.Module] = []
        for k, n in pairwise(widths):
            layers += [nn.Linear(k, n), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Numbers [M, dense] and indices [M, tables, bag] to probabilities [M, 1]."""
        low = self.bottom(dense)
        vectors = torch.stack([low] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pair_rows, self.pair_columns]
        return torch.sigmoid(self.last(self.top(torch.cat([low, pairs], dim=1))))


class VisionTransformerSize(NamedTuple):
    """A vision transformer's sizes."""

    image: int
    patch: int
    width: int
    blocks: int
    heads: int
    classes: int


class Attention(nn.Module):
    """Self-attention over tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] to the same."""
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.proj(h.transpose(1, 2).reshape(b, n, c))
        return result


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, and a dropout that is off."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(width, 4 * width), activation
        self.drop, self.fc2 = nn.Dropout(0.0), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to the same."""
        result: Tensor = self.fc2(self.drop(self.act(self.fc1(x))))
        return result


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int, activation: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), FeedForward(width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] to the same."""
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(nn.Module):
    """Patches and a class token, transformer blocks, a head."""

    def __init__(self, size: VisionTransformerSize, activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        tokens = (size.image // size.patch) ** 2 + 1
        self.token = nn.Parameter(torch.randn(1, 1, size.width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, tokens, size.width) * 0.02)
        self.blocks = nn.ModuleList(
            TransformerBlock(size.width, size.heads, activation()) for _ in range(size.blocks)
        )
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, image, image] to [B, classes]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x)[:, 0])
        return result
