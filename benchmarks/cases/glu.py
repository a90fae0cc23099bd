"""What ``--glu`` measures: gated pairs of products at the sizes of models' layers.

A shape is that of the one product which PyTorch's users run, M x 2N x K; the result is M x N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Problem, Setting, Shape, matching

GLU = "glu"
SETTINGS = (Setting("bf16", "highest"), Setting("fp32", "highest"))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
# M is tokens.
LAYERS = {
    "Llama-3 8B, 4096 tokens": ("silu", Shape(4096, 2 * 14336, 4096)),
    "Llama-3.2 1B, 4096 tokens": ("silu", Shape(4096, 2 * 8192, 2048)),
    "Llama-3.2 1B, 512 tokens": ("silu", Shape(512, 2 * 8192, 2048)),
    "Mixtral 8x7B, 1024 tokens of an expert": ("silu", Shape(1024, 2 * 14336, 4096)),
    "Gemma 2B, 2048 tokens": ("gelu_tanh", Shape(2048, 2 * 16384, 2048)),
    "T5 v1.1 base, 512 x 8 tokens": ("gelu_tanh", Shape(4096, 2 * 2048, 768)),
    "T5 v1.1 small, 512 x 8 tokens": ("gelu_tanh", Shape(4096, 2 * 1024, 512)),
    "Stable Diffusion 1.5, 64 x 64, 2 images": ("gelu", Shape(8192, 2 * 1280, 320)),
    "Stable Diffusion 1.5, 32 x 32, 2 images": ("gelu", Shape(2048, 2 * 2560, 640)),
    "DINOv2-g, 8 images": ("silu", Shape(2056, 2 * 4096, 1536)),
    "EVA-02-B, 64 images": ("silu", Shape(12608, 2 * 2048, 768)),
}
CPU_LAYERS = {"tiny": ("silu", Shape(16, 2 * 32, 48))}


def gated(activation: str) -> Callable[[Tensor], Tensor]:
    """What follows the one product: its first half activated, times its second half."""
    activate = ACTIVATIONS[activation]

    def after(z: Tensor) -> Tensor:
        first, second = torch.chunk(z, 2, -1)
        return activate(first) * second

    return after


def problems() -> dict[str, Problem]:
    """By activation."""
    return {
        name: Problem(GLU, name, f"{name}(first half of z) * second half of z", {}, gated(name))
        for name in ACTIVATIONS
    }


def select(
    patterns: Sequence[str], sizes: Sequence[Shape], dtypes: Sequence[str], device: torch.device
) -> list[Case]:
    """What to measure: every layer whose name or activation matches, or SwiGLU at given sizes.

    Args:
        patterns: of layers, see `benchmarks.cases.matching`; none: all.
        sizes: M x 2N x K, in place of the layers'.
        dtypes: "bf16", "fp32".
        device: where they are to run.

    Raises:
        ValueError: a pattern that matches nothing, a size without K or with an odd number of columns, another dtype.
    """
    if any(shape.k is None or shape.n % 2 for shape in sizes):
        raise ValueError("--sizes: --glu takes MxNxK of the one product, N even")
    if other := sorted(set(dtypes) - {setting.dtype_name for setting in SETTINGS}):
        raise ValueError(f"--dtypes: --glu takes bf16 and fp32, got {other[0]}")
    layers = {str(shape): ("silu", shape) for shape in sizes}
    layers = layers or (CPU_LAYERS if device.type == "cpu" else LAYERS)
    every = problems()
    return [
        Case(every[activation], shape, setting, (name,))
        for name, (activation, shape) in layers.items()
        if name in matching(list(layers), patterns, "with --glu")
        for setting in SETTINGS
        if setting.dtype_name in dtypes
    ]
