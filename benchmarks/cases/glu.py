"""Gated pairs of products at the sizes of models' layers.

A shape is that of the one product which PyTorch's users run, M x 2N x K; the result is M x N.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import GLU, Problem, Shape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
# M is tokens.
LAYERS = {
    "silu": (
        ("Llama-3 8B, 4096 tokens", Shape(4096, 2 * 14336, 4096)),
        ("Llama-3.2 1B, 4096 tokens", Shape(4096, 2 * 8192, 2048)),
        ("Llama-3.2 1B, 512 tokens", Shape(512, 2 * 8192, 2048)),
        ("Mixtral 8x7B, 1024 tokens of an expert", Shape(1024, 2 * 14336, 4096)),
        ("DINOv2-g, 8 images", Shape(2056, 2 * 4096, 1536)),
        ("EVA-02-B, 64 images", Shape(12608, 2 * 2048, 768)),
    ),
    "gelu_tanh": (
        ("Gemma 2B, 2048 tokens", Shape(2048, 2 * 16384, 2048)),
        ("T5 v1.1 base, 512 x 8 tokens", Shape(4096, 2 * 2048, 768)),
        ("T5 v1.1 small, 512 x 8 tokens", Shape(4096, 2 * 1024, 512)),
    ),
    "gelu": (
        ("Stable Diffusion 1.5, 64 x 64, 2 images", Shape(8192, 2 * 1280, 320)),
        ("Stable Diffusion 1.5, 32 x 32, 2 images", Shape(2048, 2 * 2560, 640)),
    ),
}


def problems() -> list[Problem]:
    """One for each activation."""
    return [
        Problem(GLU, name, f"{name}(first half of z) * second half of z", {}, _gated(name), models=layers)
        for name, layers in LAYERS.items()
    ]


def _gated(name: str) -> Callable[[Tensor], Tensor]:
    def after(z: Tensor) -> Tensor:
        first, second = torch.chunk(z, 2, -1)
        return ACTIVATIONS[name](first) * second

    return after
