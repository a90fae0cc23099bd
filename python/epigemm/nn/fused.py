"""Layers with an activation of epigemm's own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from epigemm import functional
from epigemm.epilogues import (
    BIAS_RELU,
    BIAS_SILU,
    BIAS_TANH,
    RELU_DIV,
    SIGMOID_SCALE_RESIDUAL,
    Epilogue,
    gelu_epilogue,
)
from epigemm.nn.base import FusedLinear, sharing

_Layer = TypeVar("_Layer", bound="_Activated")


class _Activated(FusedLinear):
    """A layer that is told by its epilogue alone."""

    @classmethod
    def from_linear(
        cls: type[_Layer], linear: nn.Linear, *, precision: str | None = None, strict: bool = False
    ) -> _Layer:
        """The fused layer over the parameter objects of `linear`."""
        module: _Layer = sharing(cls(1, 1, device="meta", precision=precision, strict=strict), linear)
        return module


class LinearReLU(_Activated):
    """relu(x @ weight.T + bias): an `nn.Linear` and the ReLU after it in one kernel.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearReLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = BIAS_RELU


class LinearGELU(FusedLinear):
    """gelu(x @ weight.T + bias): an `nn.Linear` and the `nn.GELU` after it in one kernel.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        approximate: "none": with erf; or "tanh".
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearGELU(64, 32, approximate="tanh")(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        approximate: str = "none",
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, precision=precision, strict=strict, device=device, dtype=dtype
        )
        gelu_epilogue(approximate)  # which checks it
        self.approximate = approximate

    @property
    def _epilogue(self) -> Epilogue:  # type: ignore[override]
        return gelu_epilogue(self.approximate)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        approximate: str = "none",
        precision: str | None = None,
        strict: bool = False,
    ) -> LinearGELU:
        """The fused layer over the parameter objects of `linear`."""
        module: LinearGELU = sharing(
            cls(1, 1, approximate=approximate, device="meta", precision=precision, strict=strict), linear
        )
        return module

    def extra_repr(self) -> str:
        """As of `FusedLinear`, with the form."""
        return f"{super().extra_repr()}, approximate={self.approximate!r}"


class LinearSiLU(_Activated):
    """z * sigmoid(z),  z = x @ weight.T + bias: an `nn.Linear` and the `nn.SiLU` after it in one kernel.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearSiLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = BIAS_SILU


class LinearTanh(_Activated):
    """tanh(x @ weight.T + bias): an `nn.Linear` and the `nn.Tanh` after it in one kernel.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearTanh(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = BIAS_TANH


class LinearSigmoidScaleResidual(FusedLinear):
    """z + scale * sigmoid(z),  z = x @ weight.T + bias, in one kernel.

    Args:
        in_features: K.
        out_features: N.
        scale: a number, or a 0-d tensor (an `nn.Parameter` is learned).
        bias: whether there is one.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearSigmoidScaleResidual(64, 32, scale=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    scale: float | Tensor
    _epilogue = SIGMOID_SCALE_RESIDUAL
    _scalar = "scale"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale: float | Tensor = 1.0,
        bias: bool = True,
        *,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, precision=precision, strict=strict, device=device, dtype=dtype
        )
        self._set_scalar(scale)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scale: float | Tensor = 1.0,
        *,
        precision: str | None = None,
        strict: bool = False,
    ) -> LinearSigmoidScaleResidual:
        """The fused layer over the parameter objects of `linear`."""
        module: LinearSigmoidScaleResidual = sharing(
            cls(1, 1, scale, device="meta", precision=precision, strict=strict), linear
        )
        return module


class LinearReLUDiv(FusedLinear):
    """relu(x @ weight.T + bias) / divisor in one kernel.

    Args:
        in_features: K.
        out_features: N.
        divisor: a number, or a 0-d tensor (an `nn.Parameter` is learned).
        bias: whether there is one.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`.

    Example:
        >>> epigemm.nn.LinearReLUDiv(64, 32, divisor=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    divisor: float | Tensor
    _epilogue = RELU_DIV
    _scalar = "divisor"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        divisor: float | Tensor = 1.0,
        bias: bool = True,
        *,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, precision=precision, strict=strict, device=device, dtype=dtype
        )
        self._set_scalar(divisor)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        divisor: float | Tensor = 1.0,
        *,
        precision: str | None = None,
        strict: bool = False,
    ) -> LinearReLUDiv:
        """The fused layer over the parameter objects of `linear`."""
        module: LinearReLUDiv = sharing(
            cls(1, 1, divisor, device="meta", precision=precision, strict=strict), linear
        )
        return module


class Sigmoid(nn.Module):
    """1 / (1 + exp(-x)), in place of `nn.Sigmoid`.

    Shape:
        Any.

    Example:
        >>> epigemm.nn.Sigmoid()(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return functional.sigmoid(x)
