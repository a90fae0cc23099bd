"""The public functions, each beside the plain PyTorch program that a user would replace by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from tests.support.cases import signed

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Public:
    """`eager(**arguments)` is what `call(**arguments)` promises to compute."""

    name: str
    eager: Callable[..., Tensor]
    vectors: tuple[str, ...] = ()  # arguments of length N, in the dtype of x
    scalar: str = ""  # an argument that is a number or a 0-d tensor

    @property
    def call(self) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(epigemm, self.name)
        return function

    @property
    def is_linear(self) -> bool:
        return self.name.startswith("linear")

    def draw(
        self,
        rng: torch.Generator,
        *,
        shape: tuple[int, int, int] = (9, 16, 24),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tensor_scalar: bool = False,
    ) -> Arguments:
        """Random arguments; x is M x K for a linear function, else M x N."""
        m, n, k = shape
        drawn: Arguments = {"x": signed((m, k if self.is_linear else n), rng, mixed=False)}
        if self.is_linear:
            drawn["weight"] = signed((n, k), rng, mixed=False) / max(k, 1) ** 0.5
        for name in self.vectors:
            vector = signed((n,), rng, mixed=False)
            drawn[name] = vector.abs() + 0.25 if name == "running_var" else vector
        moved: Arguments = {name: value.to(device, dtype) for name, value in drawn.items()}
        if self.scalar:
            moved[self.scalar] = -1.75
            if tensor_scalar:
                scalar_dtype = torch.float64 if dtype is torch.float64 else torch.float32
                moved[self.scalar] = torch.tensor(-1.75, dtype=scalar_dtype, device=device)
        return moved


def batch_norm(
    z: Tensor, running_mean: Tensor, running_var: Tensor, bn_weight: Tensor, bn_bias: Tensor, eps: float
) -> Tensor:
    """Inference BatchNorm from plain operators: F.batch_norm asks for one dtype, these promote."""
    normal = (z - running_mean) / torch.sqrt(running_var + eps)
    return normal * bn_weight + bn_bias


def linear_scale_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    z = F.linear(x, weight, bias) * scale
    return batch_norm(z, running_mean, running_var, bn_weight, bn_bias, eps)


STATISTICS = ("running_mean", "running_var", "bn_weight", "bn_bias")


def sigmoid_scale_residual(z: Tensor, scale: float | Tensor) -> Tensor:
    return z + scale * torch.sigmoid(z)


PUBLIC = [
    Public("linear", lambda x, weight, bias=None: F.linear(x, weight, bias), ("bias",)),
    Public("linear_relu", lambda x, weight, bias=None: F.relu(F.linear(x, weight, bias)), ("bias",)),
    Public(
        "linear_sigmoid_scale_residual",
        lambda x, weight, bias=None, scale=1.0: sigmoid_scale_residual(F.linear(x, weight, bias), scale),
        ("bias",),
        "scale",
    ),
    Public(
        "linear_scale",
        lambda x, weight, bias, scale: F.linear(x, weight, bias) * scale,
        ("bias", "scale"),
    ),
    Public("linear_scale_batch_norm", linear_scale_batch_norm, ("bias", "scale", *STATISTICS)),
    Public(
        "linear_relu_div",
        lambda x, weight, bias=None, divisor=1.0: F.relu(F.linear(x, weight, bias)) / divisor,
        ("bias",),
        "divisor",
    ),
    Public("sigmoid", lambda x: torch.sigmoid(x)),
    Public("bias_relu", lambda x, bias: F.relu(x + bias), ("bias",)),
    Public("sigmoid_scale_residual", lambda x, scale=1.0: sigmoid_scale_residual(x, scale), (), "scale"),
    Public(
        "scale_batch_norm",
        lambda x, scale, running_mean, running_var, bn_weight, bn_bias, eps=1e-5: batch_norm(
            x * scale, running_mean, running_var, bn_weight, bn_bias, eps
        ),
        ("scale", *STATISTICS),
    ),
    Public("relu_div", lambda x, divisor=1.0: F.relu(x) / divisor, (), "divisor"),
]
BY_NAME = {function.name: function for function in PUBLIC}
PUBLIC_LINEAR = [function for function in PUBLIC if function.is_linear]
PUBLIC_ELEMENTWISE = [function for function in PUBLIC if not function.is_linear]


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def map_tensors(arguments: Arguments, change: Callable[[Tensor], Any]) -> Arguments:
    return {k: change(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
