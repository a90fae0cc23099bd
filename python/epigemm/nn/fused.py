"""Layers with an activation, or another epilogue of epigemm's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from epigemm import docstrings, formula_functions, functional
from epigemm.arguments import checks
from epigemm.epilogues import library
from epigemm.epilogues.formulas import GATED
from epigemm.epilogues.registry import Epilogue
from epigemm.nn.base import CallOptions, EpilogueLinear, FusedLinear, Options, set_vector

if TYPE_CHECKING:
    from typing_extensions import Unpack


@docstrings.of_layer
class LinearReLU(EpilogueLinear):
    """relu(x @ weight.T + bias): an `nn.Linear` and the ReLU after it in one kernel.

    Example:
        >>> epigemm.nn.LinearReLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = library.BIAS_RELU


@docstrings.of_layer
class LinearGELU(EpilogueLinear):
    """gelu(x @ weight.T + bias): an `nn.Linear` and the `nn.GELU` after it in one kernel.

    Example:
        >>> epigemm.nn.LinearGELU(64, 32, approximate="tanh")(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _shown = ("approximate",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        approximate: str = "none",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        library.gelu_epilogue(approximate)  # which checks it
        self.approximate = approximate

    @property
    def _epilogue(self) -> Epilogue:  # type: ignore[override]
        return library.gelu_epilogue(self.approximate)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, approximate: str = "none", **options: Unpack[CallOptions]
    ) -> LinearGELU:
        """The fused layer over the parameter objects of `linear`."""
        return cls._sharing(linear, options, approximate=approximate)


@docstrings.of_layer
class LinearSiLU(EpilogueLinear):
    """z * sigmoid(z),  z = x @ weight.T + bias: an `nn.Linear` and the `nn.SiLU` after it in one kernel.

    Example:
        >>> epigemm.nn.LinearSiLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = library.BIAS_SILU


@docstrings.of_layer
class LinearTanh(EpilogueLinear):
    """tanh(x @ weight.T + bias): an `nn.Linear` and the `nn.Tanh` after it in one kernel.

    Example:
        >>> epigemm.nn.LinearTanh(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _epilogue = library.BIAS_TANH


@docstrings.of_layer
class LinearSigmoidScaleResidual(EpilogueLinear):
    """z + scale * sigmoid(z),  z = x @ weight.T + bias, in one kernel.

    Example:
        >>> epigemm.nn.LinearSigmoidScaleResidual(64, 32, scale=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    scale: float | Tensor
    _epilogue = library.SIGMOID_SCALE_RESIDUAL
    _scalar = "scale"
    _shown = ("scale",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale: float | Tensor = 1.0,
        bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self._set_scalar(scale)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scale: float | Tensor = 1.0, **options: Unpack[CallOptions]
    ) -> LinearSigmoidScaleResidual:
        """The fused layer over the parameter objects of `linear`."""
        return cls._sharing(linear, options, scale=scale)


@docstrings.of_layer
class LinearReLUDiv(EpilogueLinear):
    """relu(x @ weight.T + bias) / divisor in one kernel.

    Example:
        >>> epigemm.nn.LinearReLUDiv(64, 32, divisor=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    divisor: float | Tensor
    _epilogue = library.RELU_DIV
    _scalar = "divisor"
    _shown = ("divisor",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        divisor: float | Tensor = 1.0,
        bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self._set_scalar(divisor)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, divisor: float | Tensor = 1.0, **options: Unpack[CallOptions]
    ) -> LinearReLUDiv:
        """The fused layer over the parameter objects of `linear`."""
        return cls._sharing(linear, options, divisor=divisor)


@docstrings.of_layer
class LinearResidual(FusedLinear):
    """x @ weight.T + bias + residual: an `nn.Linear` and the sum after it in one kernel.

    The residual, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearResidual(64, 32)(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run("residual", x, residual)

    @property
    def _epilogue_name(self) -> str | None:
        return "residual"


@docstrings.of_layer
class LinearGated(FusedLinear):
    """activation(x @ weight.T + bias) * gate: one half of a gated layer (SwiGLU, GeGLU, ...) and the product after it.

    The gate, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearGated(64, 32, activation="gelu")(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    _shown = ("activation",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "silu",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.activation = formula_functions.checked_activation(activation)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, activation: str = "silu", **options: Unpack[CallOptions]
    ) -> LinearGated:
        """The fused layer over the parameter objects of `linear`."""
        return cls._sharing(linear, options, activation=activation)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run(GATED + formula_functions.checked_activation(self.activation), x, gate)

    @property
    def _epilogue_name(self) -> str | None:
        return GATED + self.activation


@docstrings.of_layer
class LinearLayerScaleResidual(FusedLinear):
    """residual + layer_scale * (x @ weight.T + bias), with a learned `layer_scale` `[N]`, in one kernel.

    The residual, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearLayerScaleResidual(64, 32)(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    layer_scale: Tensor
    init_values: float = 1e-5  # also on the class, because pickles of earlier versions do not have it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_values: float = 1e-5,
        **options: Unpack[Options],
    ) -> None:
        checks.number("init_values", init_values)
        super().__init__(in_features, out_features, bias, **options)
        self.init_values = float(init_values)
        filled = torch.full((out_features,), self.init_values, device=self.weight.device)
        self.layer_scale = nn.Parameter(filled.to(self.weight.dtype))

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, linear: nn.Linear, layer_scale: Tensor, **options: Unpack[CallOptions]
    ) -> LinearLayerScaleResidual:
        """The fused layer over the parameters of `linear` and a `layer_scale`, that becomes a buffer if it is none."""
        module = cls._sharing(linear, options)
        set_vector(module, "layer_scale", layer_scale)
        return module

    def reset_parameters(self) -> None:
        """As of `FusedLinear`; a `layer_scale` that is a Parameter gets `init_values` again."""
        super().reset_parameters()
        if isinstance(self.layer_scale, nn.Parameter):
            nn.init.constant_(self.layer_scale, self.init_values)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run("layer_scale_residual", x, self.layer_scale, residual)

    @property
    def _epilogue_name(self) -> str | None:
        return "layer_scale_residual"


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
