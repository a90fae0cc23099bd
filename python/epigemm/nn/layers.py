"""Linear layers with an epilogue: an activation, another one of epigemm's own, or the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from epigemm import docstrings, functional
from epigemm.arguments import checks
from epigemm.arguments.forms import Function
from epigemm.decoration import Decorated
from epigemm.decorator import UserEpilogue
from epigemm.epilogues import library
from epigemm.nn.base import Activated, CallOptions, FusedLinear, Options, in_8_bits
from epigemm.results_epilogue import ResultsEpilogue

if TYPE_CHECKING:
    from typing_extensions import Unpack


@docstrings.of_layer
class LinearReLU(FusedLinear):
    """relu(x @ weight.T + bias): an `nn.Linear` and the ReLU after it in one kernel.

    Example:
        >>> epigemm.nn.LinearReLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _function = library.BIAS_RELU


@docstrings.of_layer
class LinearGELU(FusedLinear):
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
    def _function(self) -> Function:
        return library.gelu_epilogue(self.approximate)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, approximate: str = "none", **options: Unpack[CallOptions]
    ) -> LinearGELU:
        """The fused layer over the parameter objects of `linear`."""
        return cls._over({"linear": linear}, options, approximate=approximate)


@docstrings.of_layer
class LinearSiLU(FusedLinear):
    """z * sigmoid(z),  z = x @ weight.T + bias: an `nn.Linear` and the `nn.SiLU` after it in one kernel.

    Example:
        >>> epigemm.nn.LinearSiLU(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _function = library.BIAS_SILU


@docstrings.of_layer
class LinearTanh(FusedLinear):
    """tanh(x @ weight.T + bias): an `nn.Linear` and the `nn.Tanh` after it in one kernel.

    Example:
        >>> epigemm.nn.LinearTanh(64, 32)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _function = library.BIAS_TANH


@docstrings.of_layer
class LinearSigmoidScaleResidual(FusedLinear):
    """z + scale * sigmoid(z),  z = x @ weight.T + bias, in one kernel.

    Example:
        >>> epigemm.nn.LinearSigmoidScaleResidual(64, 32, scale=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    scale: float | Tensor
    _function = library.SIGMOID_SCALE_RESIDUAL
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
        self._set_scalar("scale", scale)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scale: float | Tensor = 1.0, **options: Unpack[CallOptions]
    ) -> LinearSigmoidScaleResidual:
        """The fused layer over the parameter objects of `linear`."""
        return cls._over({"linear": linear}, options, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run(x, self.scale)


@docstrings.of_layer
class LinearReLUDiv(FusedLinear):
    """relu(x @ weight.T + bias) / divisor in one kernel.

    Example:
        >>> epigemm.nn.LinearReLUDiv(64, 32, divisor=2.0)(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    divisor: float | Tensor
    _function = library.RELU_DIV
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
        self._set_scalar("divisor", divisor)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, divisor: float | Tensor = 1.0, **options: Unpack[CallOptions]
    ) -> LinearReLUDiv:
        """The fused layer over the parameter objects of `linear`."""
        return cls._over({"linear": linear}, options, divisor=divisor)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run(x, self.divisor)


@docstrings.of_layer
class LinearResidual(FusedLinear):
    """x @ weight.T + bias + residual: an `nn.Linear` and the sum after it in one kernel.

    The residual, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearResidual(64, 32)(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    _function = library.FUNCTIONS["residual"]

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer."""
        return self._run(x, residual)


@docstrings.of_layer
class LinearGated(Activated):
    """activation(x @ weight.T + bias) * gate: one half of a gated layer (SwiGLU, GeGLU, ...) and the product after it.

    The gate, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearGated(64, 32, activation="gelu")(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer."""
        return self._run(x, gate)


@docstrings.of_layer
class LinearLayerScaleResidual(FusedLinear):
    """residual + layer_scale * (x @ weight.T + bias), with a learned `layer_scale` `[N]`, in one kernel.

    The residual, of the result's shape, is an argument of the call.

    Example:
        >>> epigemm.nn.LinearLayerScaleResidual(64, 32)(torch.randn(8, 64), torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """

    layer_scale: Tensor
    _function = library.FUNCTIONS["layer_scale_residual"]
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
        module = cls._over({"linear": linear}, options)
        module._share("layer_scale", layer_scale)
        return module

    def reset_parameters(self) -> None:
        """As of `FusedLinear`; a `layer_scale` that is a Parameter gets `init_values` again."""
        super().reset_parameters()
        if isinstance(self.layer_scale, nn.Parameter):
            nn.init.constant_(self.layer_scale, self.init_values)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer."""
        return self._run(x, self.layer_scale, residual)


@docstrings.of_layer
class Linear(FusedLinear):
    """A linear layer with an epilogue of the user's: epilogue(x @ weight.T, operands...) in one kernel.

    If the epilogue has an operand `bias: PerColumn`, it is the layer's own bias. The other operands are arguments of
    the call, by position or name. Without an epilogue the layer computes the product and the bias. With an epilogue of
    several results the layer returns several.

    Raises:
        TypeError: `epilogue` is not an epilogue; `bias=True`, and it has no operand `bias: PerColumn`; `bias=False`,
            and it has one without the default None.

    Example:
        >>> layer = epigemm.nn.Linear(64, 32, epilogue=swish_clamp)
        >>> y = layer(x, residual, limit=0.5)
    """

    _function = library.BIAS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool | None = None,
        *,
        epilogue: UserEpilogue | ResultsEpilogue | None = None,
        **options: Unpack[Options],
    ) -> None:
        if epilogue is not None and not isinstance(epilogue, Decorated):
            raise TypeError(
                f"epilogue: got {type(epilogue).__name__}; accepted is what epigemm.epilogue makes of a function"
            )
        takes_bias = epilogue is None or epilogue.takes_bias
        if bias and not takes_bias:
            raise TypeError(
                "bias: got True for an epilogue without an operand bias: PerColumn; accepted is False"
            )
        specs = () if epilogue is None else epilogue.traced.operands
        if (
            bias is False
            and takes_bias
            and any(each.name == "bias" and not each.is_optional for each in specs)
        ):
            raise TypeError(
                "bias: got False for an epilogue that needs its operand bias; accepted is True, or an epilogue with "
                "bias: PerColumn = None"
            )
        has_bias = takes_bias if bias is None else bias
        super().__init__(in_features, out_features, has_bias, **options)
        self.epilogue = epilogue

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        epilogue: UserEpilogue | ResultsEpilogue | None = None,
        **options: Unpack[CallOptions],
    ) -> Linear:
        """The layer over the parameter objects of `linear`."""
        bias = isinstance(linear, nn.Linear) and linear.bias is not None
        return cls._over({"linear": linear}, options, bias=bias, epilogue=epilogue)

    def forward(self, x: Tensor, *operands: Tensor | float | None, **named: Tensor | float | None) -> Any:
        """Apply the layer. `operands`: those of the epilogue, without the layer's own bias."""
        if self.epilogue is None:
            if operands or named:
                raise TypeError("operands: got some for a layer without an epilogue; accepted is x alone")
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if self.epilogue.takes_bias:
            others = [spec.name for spec in self.epilogue.traced.operands if spec.name != "bias"]
            if len(operands) > len(others) or "bias" in named:
                raise TypeError(
                    f"operands: got {len(operands)} and {sorted(named)}; accepted are {others}, beside the layer's bias"
                )
            by_place = dict(zip(others, operands, strict=False))
            if twice := by_place.keys() & named.keys():
                raise TypeError(f"operands: got {sorted(twice)} twice; accepted is one value each")
            operands, named = (), {**by_place, **named, **({} if bias is None else {"bias": bias})}
        given: Any = {**named, "precision": self.precision, "strict": self.strict}
        if (scale := self._buffers.get("weight_scale")) is not None:
            x, scales = in_8_bits(x, scale)
            given.update(scales)
        return self.epilogue(x, weight, *operands, **given)

    @property
    def _epilogue_name(self) -> str | None:
        return None if self.epilogue is None else self.epilogue.traced.name


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
