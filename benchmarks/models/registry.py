"""Every model by name, with its inputs and its two batches.

The first nine are what fusion was made with. The others, from "nerf" on, had never been tried before they came here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import unseen
from benchmarks.models.networks import (
    DLRM,
    BertLayer,
    GPT2Layer,
    Images,
    LlamaLayer,
    MixerLayer,
    ResidualBlock,
    RMSNorm,
    T5Layer,
    Tokens,
    ViTLayer,
    mlp,
)
from benchmarks.models.vision import ConvNeXt, SegFormer, Swin

Inputs = tuple[Tensor, ...]
PRECISIONS = {"fp32_highest": torch.float32, "bf16": torch.bfloat16, "fp32_high": torch.float32}
"""The most telling first."""
WORST_ERROR = 1.5
_CHOICES = 3.0


@dataclass(frozen=True)
class Network:
    """A model and its inputs.

    Attributes:
        build: the model with this many layers, in fp32 on the default device.
        draw: inputs from a generator, on its device, for a batch.
        batches: arguments of `draw`: a small and a large batch. At the large one the device is to be busy for twice
            what eager costs a slow host in bf16, of 14 to 20 us a kernel: else a ratio says what hosts do. Training
            takes it, too, and its check keeps activations in float64: 28 GB for the largest, ConvNeXt.
        layers: how many are measured.
        worst_error: the largest error of ours, as a multiple of the same without fusion. Fused bf16 layers round less
            often; TF32's stand-in rounds ties otherwise. Where a model chooses between experts, a few tokens that are
            rounded otherwise choose another one, and the error is a matter of how many.
    """

    build: Callable[[int], nn.Module]
    draw: Callable[..., Inputs]
    batches: tuple[tuple[int, ...], ...]
    layers: int = 2
    worst_error: float = WORST_ERROR


def _tokens(words: int) -> Callable[..., Inputs]:
    return lambda generator, batch, length: (
        torch.randint(words, (batch, length), generator=generator, device=generator.device),
    )


def _normal(*shape: int) -> Callable[..., Inputs]:
    return lambda generator, batch: (
        torch.randn(batch, *shape, generator=generator, device=generator.device),
    )


def _sound(generator: torch.Generator, batch: int, length: int) -> Inputs:
    return (torch.randn(batch, length, generator=generator, device=generator.device),)


def _uniform(*widths: int) -> Callable[..., Inputs]:
    """For each width a tensor between -1 and 1."""
    return lambda generator, batch: tuple(
        2 * torch.rand(batch, width, generator=generator, device=generator.device) - 1 for width in widths
    )


def _features(tables: int, entries: int) -> Callable[..., Inputs]:
    return lambda generator, batch: (
        torch.randn(batch, 13, generator=generator, device=generator.device),
        torch.randint(entries, (batch, tables, 4), generator=generator, device=generator.device),
    )


def _stack(count: int, layer: Callable[[], nn.Module]) -> list[Any]:
    return [layer() for _ in range(count)]


# Identical layers repeat: two of them measure what twelve would, and compile in a sixth of the time.
NETWORKS: dict[str, Network] = {
    "bert-base": Network(
        lambda n: Tokens(30522, 768, _stack(n, lambda: BertLayer(768, 12, 3072)), nn.LayerNorm(768)),
        _tokens(30522),
        ((2, 128), (128, 128)),
    ),
    "gpt2": Network(
        lambda n: Tokens(50257, 768, _stack(n, lambda: GPT2Layer(768, 12, 3072)), nn.LayerNorm(768)),
        _tokens(50257),
        ((1, 64), (32, 512)),
    ),
    "vit-b16": Network(
        lambda n: Images(768, _stack(n, lambda: ViTLayer(768, 12, 3072))),
        _normal(3, 224, 224),
        ((4,), (64,)),
    ),
    "mixer-b16": Network(
        lambda n: Images(768, _stack(n, lambda: MixerLayer(768, 196, 384, 3072))),
        _normal(3, 224, 224),
        ((4,), (64,)),
    ),
    "llama-1b": Network(
        lambda n: Tokens(32000, 2048, _stack(n, lambda: LlamaLayer(2048, 32, 8, 8192, 512)), RMSNorm(2048)),
        _tokens(32000),
        ((1, 512), (8, 512)),
    ),
    "t5-small": Network(
        lambda n: Tokens(32128, 512, _stack(n, lambda: T5Layer(512, 8, 2048, 128)), RMSNorm(512)),
        _tokens(32128),
        ((8, 128), (384, 128)),
    ),
    "dlrm": Network(
        lambda n: DLRM(26, 100_000, (512, 256, 128), (1024, 1024, 512, 256)),
        _features(26, 100_000),
        ((2048,), (32768,)),
        layers=1,
    ),
    "resmlp": Network(
        lambda n: nn.Sequential(*_stack(n, lambda: ResidualBlock(1024, 4096))),
        _normal(1024),
        ((256,), (12288,)),
        layers=8,
    ),
    "mlp-16": Network(
        lambda n: mlp(*[4096] * (n + 1)),
        _normal(4096),
        ((256,), (4096,)),
        layers=16,
    ),
    "nerf": Network(lambda n: unseen.NeRF(256, n), _uniform(3, 3), ((4096,), (262144,)), layers=8),
    "siren": Network(lambda n: unseen.siren(256, n), _uniform(2), ((4096,), (131072,)), layers=5),
    "tabular-resnet": Network(
        lambda n: unseen.tabular_resnet(128, 512, n),
        _normal(128),
        ((256,), (65536,)),
        layers=6,
    ),
    "swin-t": Network(
        lambda n: Swin(96, (2, 2, 6, 2)[:n]),
        _normal(3, 224, 224),
        ((2,), (80,)),
        layers=4,
    ),
    "convnext-t": Network(
        lambda n: ConvNeXt((96, 192, 384, 768)[:n], (3, 3, 9, 3)[:n]),
        _normal(3, 224, 224),
        ((2,), (128,)),
        layers=4,
    ),
    "opt": Network(
        lambda n: nn.Sequential(
            nn.Embedding(50272, 768),
            unseen.Positions(512, 768),
            *_stack(n, lambda: unseen.OPTLayer(768, 12, 3072)),
            nn.LayerNorm(768),
        ),
        _tokens(50272),
        ((1, 64), (32, 512)),
        layers=4,
    ),
    "mixtral": Network(
        lambda n: Tokens(
            32000, 1024, _stack(n, lambda: unseen.MixtralLayer(1024, 16, 4, 3584)), RMSNorm(1024)
        ),
        _tokens(32000),
        ((1, 64), (24, 512)),
        worst_error=_CHOICES,
    ),
    "wav2vec2": Network(
        lambda n: unseen.Wav2Vec2(512, 768, _stack(n, lambda: unseen.Wav2Vec2Layer(768, 12, 3072))),
        _sound,
        ((1, 16000), (4, 80000)),
        layers=4,
    ),
    "segformer": Network(
        lambda n: SegFormer((32, 64, 160, 256), (n,) * 4, 256),
        _normal(3, 512, 512),
        ((1,), (24,)),
    ),
}
