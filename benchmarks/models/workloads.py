"""Which models are measured: how each is built, what goes in, and at which sizes."""

from __future__ import annotations

import fnmatch
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from benchmarks.models import networks, problems
from benchmarks.models.networks import DLRMSize, MLPSize, ResMLPSize, VisionTransformerSize
from benchmarks.models.problems import Layer

INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)
Inputs = tuple[Tensor, ...]
_Size = TypeVar("_Size")


@dataclass(frozen=True)
class Workload(Generic[_Size]):
    """A model at two sizes, and random inputs for it.

    Attributes:
        name: what ``--cases`` matches against.
        title: for tables.
        build: the model of a size, in fp32, initialised from torch's default generator.
        draw: its inputs for a batch, from a generator and on its device.
        real: the size that is measured on a GPU, and its batches.
        small: the size for CPUs and tests, and its batches.
        modes: "inference", and "training" where a training step is measured.
        compiled: the batch of each size at which it is compiled too; None: at none, as it would tell nothing new.
    """

    name: str
    title: str
    build: Callable[[_Size], nn.Module]
    draw: Callable[[_Size, int, Generator], Inputs]
    real: _Size
    small: _Size
    batches: tuple[int, ...]
    small_batches: tuple[int, ...] = (8, 32)
    modes: tuple[str, ...] = (INFERENCE,)
    compiled: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name

    def model(self, *, small: bool, device: torch.device, seed: int) -> nn.Module:
        """The model on a device, always the same for a seed."""
        torch.manual_seed(seed)
        with device:
            return _with_statistics(self.build(self.small if small else self.real))

    def inputs(self, batch: int, *, small: bool, device: torch.device, seed: int) -> Inputs:
        """The inputs on a device, always the same for a seed."""
        generator = Generator(device=device).manual_seed(seed)
        return self.draw(self.small if small else self.real, batch, generator)


def _with_statistics(model: nn.Module) -> nn.Module:
    """Gives BatchNorm layers what training would have left there: a new one's zeros and ones hide mistakes."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return model


def _normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device)


def _rows(size: Layer, batch: int, generator: Generator) -> Inputs:
    return (_normal(generator, batch, size.in_features),)


def _wide_rows(size: MLPSize | ResMLPSize, batch: int, generator: Generator) -> Inputs:
    return (_normal(generator, batch, size.width),)


def _features(size: DLRMSize, batch: int, generator: Generator) -> Inputs:
    shape = (batch, size.tables, size.bag)
    indices = torch.randint(0, size.rows, shape, generator=generator, device=generator.device)
    return _normal(generator, batch, size.dense), indices


def _images(size: VisionTransformerSize, batch: int, generator: Generator) -> Inputs:
    return (_normal(generator, batch, 3, size.image, size.image),)


def _problem(
    number: str,
    title: str,
    model: Callable[[int, int], nn.Module],
    real: Layer,
    batch: int,
    **options: Any,
) -> Workload[Layer]:
    return Workload(
        f"problem_{number}",
        title,
        lambda size: model(size.in_features, size.out_features),
        _rows,
        real,
        Layer(64, 48),
        (batch,),
        (32,),
        **options,
    )


_REAL, _REAL_39, _BOTH = Layer(8192, 8192), Layer(4096, 4096), MODES
_VIT_TINY = VisionTransformerSize(image=224, patch=16, width=192, blocks=12, heads=3, classes=1000)
_VIT_SMALL = VisionTransformerSize(image=32, patch=8, width=32, blocks=2, heads=4, classes=10)
_ROWS = (16, 256, 4096)

PROBLEMS: tuple[Workload[Any], ...] = (
    _problem("76", "Gemm + Add + ReLU", problems.GemmAddReLU, _REAL, 1024, compiled=(1024, 32)),
    _problem(
        "70",
        "Gemm + Sigmoid + Scaling + ResidualAdd",
        problems.GemmSigmoidScalingResidualAdd,
        _REAL,
        1024,
        compiled=(1024, 32),
    ),
    _problem(
        "33",
        "Gemm + Scale + BatchNorm",
        problems.GemmScaleBatchNorm,
        _REAL,
        1024,
        compiled=(1024, 32),
        modes=_BOTH,
    ),
    _problem("39", "Gemm + Scale + BatchNorm", problems.GemmScaleBatchNorm, _REAL_39, 16384, modes=_BOTH),
    _problem("63", "Gemm + ReLU + Divide", problems.GemmReLUDivide, _REAL, 1024),
    Workload(
        "problem_21",
        "Sigmoid",
        lambda size: problems.Sigmoid(),
        _rows,
        Layer(393216, 393216),
        Layer(64, 64),
        (4096,),
        (32,),
    ),
)
NETWORKS: tuple[Workload[Any], ...] = (
    Workload(
        "mlp",
        "MLP of 16 layers: linear, ReLU",
        lambda size: networks.MLP(*size),
        _wide_rows,
        MLPSize(16, 4096),
        MLPSize(4, 32),
        _ROWS,
        modes=_BOTH,
        compiled=(256, 32),
    ),
    Workload(
        "mlp_batch_norm",
        "MLP of 16 layers: linear, BatchNorm, ReLU",
        lambda size: networks.MLP(size.layers, size.width, batch_norm=True),
        _wide_rows,
        MLPSize(16, 4096),
        MLPSize(4, 32),
        _ROWS,
        compiled=(256, 32),
    ),
    Workload(
        "resmlp",
        "8 residual blocks: linear, ReLU, linear",
        lambda size: networks.ResMLP(*size),
        _wide_rows,
        ResMLPSize(8, 1024, 4),
        ResMLPSize(2, 32, 4),
        _ROWS,
        compiled=(256, 32),
    ),
    Workload(
        "dlrm",
        "DLRM: 26 embedding bags, bottom and top MLP",
        networks.DLRM,
        _features,
        DLRMSize(13, 26, 100_000, 4, (512, 256, 128), (1024, 1024, 512, 256)),
        DLRMSize(13, 4, 50, 3, (32, 16), (64, 32)),
        (2048, 16384),
        compiled=(2048, 32),
    ),
)
VIT = Workload(
    "vit",
    "vision transformer, ViT-Ti/16, plain",
    networks.VisionTransformer,
    _images,
    _VIT_TINY,
    _VIT_SMALL,
    (16, 128),
    (2, 4),
    compiled=(16, 2),
)


def _timm_model(size: VisionTransformerSize) -> nn.Module:
    timm: Any = importlib.import_module("timm")
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=size.image,
        patch_size=size.patch,
        embed_dim=size.width,
        depth=size.blocks,
        num_heads=size.heads,
        num_classes=size.classes,
    )
    return model


TIMM_VIT = Workload(
    "timm_vit",
    "vision transformer, timm's vit_tiny_patch16_224",
    _timm_model,
    _images,
    _VIT_TINY,
    _VIT_SMALL,
    (16, 128),
    (2, 4),
    compiled=(16, 2),
)
WORKLOADS: tuple[Workload[Any], ...] = (*NETWORKS, VIT, *PROBLEMS)
"""The models that need nothing but torch."""


@functools.cache
def _why_no_timm() -> str:
    try:
        importlib.import_module("timm")
    except (
        ImportError,
        RuntimeError,
    ) as error:  # the latter where torchvision, which it needs, is of another torch
        return str(error)
    return ""


def absent() -> dict[str, str]:
    """Models that cannot be built here, and why."""
    reason = _why_no_timm()
    return {TIMM_VIT.name: f"{reason}; measured instead: {VIT.name}"} if reason else {}


def available() -> tuple[Workload[Any], ...]:
    """What this machine can build: timm's vision transformer where timm is installed, else the plain one."""
    if absent():
        return WORKLOADS
    return tuple(TIMM_VIT if workload is VIT else workload for workload in WORKLOADS)


def select(patterns: Sequence[str]) -> list[Workload[Any]]:
    """The workloads that names, parts of names or patterns choose; all that can be built for none.

    Raises:
        ValueError: a pattern that chooses none; names all of them.
    """
    # Asked for by name, the plain transformer can be had beside timm's.
    everything = (*WORKLOADS, *(w for w in available() if w not in WORKLOADS))
    chosen: list[Workload[Any]] = []
    for pattern in patterns:
        exact = [w for w in everything if w.name == pattern]
        found = exact or [w for w in everything if fnmatch.fnmatch(w.name, f"*{pattern}*")]
        if not found:
            names = ", ".join(w.name for w in everything)
            raise ValueError(f"--cases: {pattern!r} matches none of the models: {names}")
        chosen += found
    return list(dict.fromkeys(chosen)) if patterns else list(available())
