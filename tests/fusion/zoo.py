"""Models as people write them, in plain PyTorch, with the functions that fusion is to find in each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNELBENCH = Path(__file__).parents[2] / "examples" / "kernelbench"


class ResMLP(nn.Module):
    """One block: a linear layer across patches and two across channels, each with a residual."""

    def __init__(self, patches: int = 16, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Linear(patches, patches)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        h: Tensor = self.fc2(self.act(self.fc1(self.norm2(x))))
        return x + h * self.gain


class DLRM(nn.Module):
    """Embeddings and a bottom MLP, their dot products, a top MLP."""

    rows: Tensor
    columns: Tensor

    def __init__(self, dense: int = 13, rows: int = 50, tables: int = 4, width: int = 16) -> None:
        super().__init__()
        self.bottom = self.mlp(dense, 32, width)
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        pairs = (tables + 1) * tables // 2
        self.top = self.mlp(pairs + width, 64, 32)
        self.last = nn.Linear(32, 1)
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("rows", rows_)
        self.register_buffer("columns", columns)

    @staticmethod
    def mlp(*sizes: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for k, n in pairwise(sizes):
            layers += [nn.Linear(k, n), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        low = self.bottom(dense)
        vectors = [low] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.rows, self.columns]
        return torch.sigmoid(self.last(self.top(torch.cat([low, pairs], 1))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v)
        return self.proj(h.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(width, 4 * width),
            activation,
            nn.Dropout(0.0),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches, two blocks of attention and MLP, a head."""

    def __init__(
        self, width: int = 32, heads: int = 4, activation: Callable[[], nn.Module] = nn.GELU
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.LayerNorm(width),
                        Attention(width, heads),
                        nn.LayerNorm(width),
                        Mlp(width, activation()),
                    ]
                )
                for _ in range(2)
            ]
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            norm1, attention, norm2, mlp = list(cast(nn.ModuleList, block))
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def deep_mlp(layers: int = 16, width: int = 32) -> nn.Sequential:
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*modules)


@dataclass(frozen=True)
class Example:
    """A model, its inputs, and what fusion finds in its forward (beside linear layers alone)."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _kernelbench(name: str, *arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        spec = importlib.util.spec_from_file_location(f"plain_{name}", KERNELBENCH / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model: nn.Module = module.Model(*arguments)
        return model

    return make


def _draw(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


PROBLEMS = [
    Example("76", _kernelbench("gemm_add_relu", 64, 48, (48,)), _draw(32, 64), ("linear_relu",)),
    Example(
        "70",
        _kernelbench("gemm_sigmoid_scaling_residual_add", 64, 48, 2.0),
        _draw(32, 64),
        ("linear_sigmoid_scale_residual",),
    ),
    Example(
        "33_39",
        _kernelbench("gemm_scale_batch_norm", 64, 48, (48,)),
        _draw(32, 64),
        ("linear_scale_batch_norm",),
    ),
    Example("63", _kernelbench("gemm_relu_divide", 64, 48, 2.0), _draw(32, 64), ("linear_relu_div",)),
    Example("21", _kernelbench("sigmoid"), _draw(16, 64), ()),
]
MODELS = [
    Example("mlp16", deep_mlp, _draw(8, 32), ("linear_relu",) * 16),
    Example("resmlp", ResMLP, _draw(4, 16, 32), ("linear_relu", "linear_scale")),
    Example("dlrm", DLRM, lambda: (torch.randn(8, 13), torch.randint(0, 50, (8, 4))), ("linear_relu",) * 4),
    Example(
        "vit_relu", lambda: VisionTransformer(activation=nn.ReLU), _draw(2, 3, 32, 32), ("linear_relu",) * 2
    ),
    Example("vit_gelu", VisionTransformer, _draw(2, 3, 32, 32), ()),
]
EVERYTHING = [*PROBLEMS, *MODELS]
