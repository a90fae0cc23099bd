"""The benchmark's models at small sizes, and some more, with how much fusion is to find in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import unseen, vision
from benchmarks.models.networks import DLRM, Images, ResidualBlock, RMSNorm, T5Layer, Tokens, ViTLayer
from tests.support.examples import EXAMPLES, load

KERNELBENCH = EXAMPLES / "kernelbench"


@dataclass(frozen=True)
class Example:
    """A model, always the same, its inputs, others at every call, and how many products fusion finds in it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    products: int

    def __str__(self) -> str:
        return self.name

    def make(self) -> nn.Module:
        """BatchNorm layers have what training would have left there: zeros and ones hide mistakes."""
        torch.manual_seed(0)
        model = self.build()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.running_mean is not None and module.running_var is not None
                nn.init.normal_(module.running_mean, std=0.2)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
        torch.seed()
        return model


def mlp_batch_norm() -> nn.Module:
    layers = ((nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*(module for layer in layers for module in layer))


def problem(file: str, *arguments: Any) -> nn.Module:
    """A model of KernelBench as that writes it."""
    model: nn.Module = load(KERNELBENCH / f"{file}.py").Model(*arguments)
    return model


def _rows(width: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*(shape or (32,)), width),)


def _problem(number: int, products: int, file: str, *arguments: Any) -> Example:
    return Example(f"problem_{number}", lambda: problem(file, *arguments), _rows(64), products)


# Problem 39 is 33 with a larger batch.
PROBLEMS = [
    _problem(76, 1, "gemm_add_relu", 64, 48, (48,)),
    _problem(70, 1, "gemm_sigmoid_scaling_residual_add", 64, 48, 2.0),
    _problem(33, 1, "gemm_scale_batch_norm", 64, 48, (48,)),
    _problem(63, 1, "gemm_relu_divide", 64, 48, 2.0),
    _problem(21, 0, "sigmoid"),
]


def _tokens(name: str, layer: Callable[[], nn.Module], products: int) -> Example:
    """Two layers behind an embedding."""
    build: Callable[[], nn.Module] = lambda: Tokens(50, 32, [layer(), layer()], RMSNorm(32))  # noqa: E731
    return Example(name, build, lambda: (torch.randint(50, (2, 16)),), products)


def _images(name: str, build: Callable[[], nn.Module], side: int, products: int) -> Example:
    return Example(name, build, lambda: (torch.randn(2, 3, side, side),), products)


MODELS = [
    Example("mlp_batch_norm", mlp_batch_norm, _rows(32), 4),
    Example("resmlp", lambda: nn.Sequential(*(ResidualBlock(32, 128) for _ in range(2))), _rows(32), 4),
    Example(
        "dlrm",
        lambda: DLRM(4, 50, (32, 16), (64, 32)),
        lambda: (torch.randn(8, 13), torch.randint(50, (8, 4, 3))),
        5,
    ),
    _images("vit", lambda: Images(32, [ViTLayer(32, 4, 128) for _ in range(2)]), 64, 9),
    # A transformer with ReLU, and with scores to which something is added.
    _tokens("t5", lambda: T5Layer(32, 4, 128, 16), 12),
]
# Those that were added after fusion was written.
UNSEEN = [
    Example("nerf", lambda: unseen.NeRF(32, 8), lambda: (torch.rand(20, 3), torch.rand(20, 3)), 12),
    Example("siren", lambda: unseen.siren(32, 3), _rows(2, 20), 4),
    Example("tabular-resnet", lambda: unseen.tabular_resnet(8, 32, 2), _rows(8, 20), 6),
    _tokens("opt", lambda: unseen.OPTLayer(32, 4, 64), 12),
    _tokens("mixtral", lambda: unseen.MixtralLayer(32, 4, 2, 64, experts=4), 10),
    Example(
        "wav2vec2",
        lambda: unseen.Wav2Vec2(16, 32, [unseen.Wav2Vec2Layer(32, 4, 64)], reach=8, groups=4),
        _rows(3000, 2),
        7,
    ),
    _images("swin-t", lambda: vision.Swin(32, (2, 2), side=64, size=8), 64, 18),
    _images("convnext-t", lambda: vision.ConvNeXt((16, 32), (1, 2)), 32, 7),
    _images("segformer", lambda: vision.SegFormer((8, 16, 16, 24), (1, 1, 1, 1), 32), 64, 28),
]
EVERYTHING = [*(PROBLEMS if KERNELBENCH.is_dir() else []), *MODELS]
