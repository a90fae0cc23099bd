"""Modules over `epigemm.functional`, made to stand where the layers that they replace stood.

Parameters are named and initialised as in `torch.nn.Linear` and `torch.nn.BatchNorm1d`; `from_linear` and
`from_layers` share the parameter objects of existing layers, so that optimisers and state dicts go on
working. The fused layers call no submodule's `forward`: hooks on the shared layers do not fire.

Where fp32 products run on fp16 pieces, a layer keeps those of its weight, if that is an `nn.Parameter`, between
calls that need no gradient of the weight. They follow the weight's changes and are in no copy, pickle or state dict;
`epigemm.packs` says which changes torch does not count: after those, call `repack()`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from epigemm import call as _call
from epigemm import functional, invariance, packs
from epigemm.epilogues import BIAS, BIAS_RELU, PER_COLUMN, RELU_DIV, SIGMOID_SCALE_RESIDUAL, Epilogue
from epigemm.user_epilogue import UserEpilogue

__all__ = [
    "Linear",
    "LinearReLU",
    "LinearReLUDiv",
    "LinearScaleBatchNorm1d",
    "LinearSigmoidScaleResidual",
    "Sigmoid",
    "linear_scale_batch_norm1d",
]


class _FusedLinear(nn.Module):
    """The parameters of an `nn.Linear`, under the same names and with the same initialisation.

    It is no subclass of `nn.Linear`: code that rewrites those (quantisers, adapters) would drop what follows
    the product.
    """

    weight: Tensor
    bias: Tensor | None
    strict: bool = False  # on the class too: pickles of earlier versions have none
    _epilogue: ClassVar[Epilogue]
    _scalar: ClassVar[str | None] = None  # the name of the epilogue's, and of the attribute

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._adopt(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))
        self.precision = precision
        self.strict = strict

    def _adopt(self, linear: nn.Linear) -> None:
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    @property
    def in_features(self) -> int:
        """K, the size of x's last dimension."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N, the size of the result's last dimension."""
        return self.weight.shape[0]

    def repack(self) -> None:
        """Split the weight into fp16 pieces again, into the memory that is kept for them.

        Needed after a change that torch does not count (see `epigemm.packs`), and before a CUDA graph is captured
        that shall use the kept pieces instead of splitting the weight at every replay. Does nothing where
        fp32 products do not run on fp16 pieces.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
        """
        packs.repack(self.weight, self.precision)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        # Module.__getattr__ takes half a microsecond for a parameter. Who replaces one by something that is none
        # (torch.nn.utils.parametrize, weight norm) takes it out of this dictionary.
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        bias: Tensor | None = self._parameters.get("bias")
        if bias is None:
            bias = self.bias
        scalar = None if self._scalar is None else getattr(self, self._scalar)
        use = _pack_use(weight)
        return _call.linear(self._epilogue, x, weight, bias, scalar, self.precision, None, self.strict, use)

    def extra_repr(self) -> str:
        """The constructor's arguments, as `nn.Linear` prints them."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
        scalar = (
            "" if self._scalar is None else f", {self._scalar}={_scalar_repr(getattr(self, self._scalar))}"
        )
        return f"{text}{_call_repr(self.precision, self.strict)}{scalar}"

    def _set_scalar(self, value: float | Tensor) -> None:
        # A tensor must follow the module to its device and dtype. It is no state of the layer that is replaced:
        # not persistent.
        assert self._scalar is not None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(self._scalar, value, persistent=False)
        else:
            setattr(self, self._scalar, value)


def _pack_use(weight: Tensor) -> str:
    """What a layer's call may do with its weight's pack.

    A weight that is no parameter (parametrised, or handed in by `torch.func.functional_call`) may be gone
    after the call.
    """
    return packs.KEEP if isinstance(weight, nn.Parameter) else packs.FIND


def _call_repr(precision: str | None, strict: bool) -> str:
    """What is not the default of a layer's calls, to be printed after other things."""
    return ("" if precision is None else f", precision={precision!r}") + (", strict=True" if strict else "")


def _sharing(module: Any, linear: nn.Linear) -> Any:
    """`module`, freshly made on the meta device, with the parameters of `linear` in place of its own."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear: got {type(linear).__name__}; accepted is a torch.nn.Linear")
    module._adopt(linear)
    module.training = linear.training
    return module


class Linear(_FusedLinear):
    """A linear layer with an epilogue of the user's: epilogue(x @ weight.T, operands...) in one kernel.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has one: it is the epilogue's operand of that name. None: where there is such
            an operand.
        epilogue: what `epigemm.epilogue` made of a function; None: the product and the bias alone.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[..., K]` to `[..., N]`. The epilogue's other operands are arguments of the call, by position or name.

    Raises:
        TypeError: `epilogue` is none; or `bias`, and the epilogue has no operand `bias` along the columns.

    Example:
        >>> layer = epigemm.nn.Linear(64, 32, epilogue=swish_clamp)
        >>> y = layer(x, residual, limit=0.5)
    """

    _epilogue = BIAS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool | None = None,
        *,
        epilogue: UserEpilogue | None = None,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if epilogue is not None and not isinstance(epilogue, UserEpilogue):
            raise TypeError(
                f"epilogue: got {type(epilogue).__name__}; accepted is what epigemm.epilogue makes of a function"
            )
        takes_bias = epilogue is None or any(
            spec.name == "bias" and spec.kind == PER_COLUMN for spec in epilogue.traced.operands
        )
        if bias and not takes_bias:
            raise TypeError(
                "bias: got True for an epilogue without an operand bias: PerColumn; accepted is False"
            )
        has_bias = takes_bias if bias is None else bias
        super().__init__(
            in_features,
            out_features,
            has_bias,
            precision=precision,
            strict=strict,
            device=device,
            dtype=dtype,
        )
        self.epilogue = epilogue

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        epilogue: UserEpilogue | None = None,
        *,
        precision: str | None = None,
        strict: bool = False,
    ) -> Linear:
        """The layer over the parameter objects of `linear`."""
        bias = isinstance(linear, nn.Linear) and linear.bias is not None
        options: dict[str, Any] = {"precision": precision, "strict": strict, "device": "meta"}
        module: Linear = _sharing(cls(1, 1, bias, epilogue=epilogue, **options), linear)
        return module

    def forward(self, x: Tensor, *operands: Tensor | float, **named: Tensor | float) -> Tensor:
        """Apply the layer; the epilogue's operands but the layer's own bias."""
        if self.epilogue is None:
            if operands or named:
                raise TypeError("operands: got some for a layer without an epilogue; accepted is x alone")
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if bias is not None:
            others = [spec.name for spec in self.epilogue.traced.operands if spec.name != "bias"]
            if len(operands) > len(others) or "bias" in named:
                raise TypeError(
                    f"operands: got {len(operands)} and {sorted(named)}; accepted are {others}, beside the layer's bias"
                )
            by_place = dict(zip(others, operands, strict=False))
            if twice := by_place.keys() & named.keys():
                raise TypeError(f"operands: got {sorted(twice)} twice; accepted is one value each")
            operands, named = (), {**by_place, **named, "bias": bias}
        return self.epilogue.call(
            x, weight, operands, named, None, self.precision, self.strict, _pack_use(weight)
        )

    def extra_repr(self) -> str:
        """The constructor's arguments, as `nn.Linear` prints them."""
        return super().extra_repr() + (
            "" if self.epilogue is None else f", epilogue={self.epilogue.traced.name}"
        )


class LinearReLU(_FusedLinear):
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

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, precision: str | None = None, strict: bool = False
    ) -> LinearReLU:
        """The fused layer over the parameter objects of `linear`."""
        module: LinearReLU = _sharing(cls(1, 1, device="meta", precision=precision, strict=strict), linear)
        return module


class LinearSigmoidScaleResidual(_FusedLinear):
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
        module: LinearSigmoidScaleResidual = _sharing(
            cls(1, 1, scale, device="meta", precision=precision, strict=strict), linear
        )
        return module


class LinearReLUDiv(_FusedLinear):
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
        module: LinearReLUDiv = _sharing(
            cls(1, 1, divisor, device="meta", precision=precision, strict=strict), linear
        )
        return module


def _scalar_repr(value: float | Tensor) -> str:
    return "tensor" if isinstance(value, Tensor) else str(value)


def linear_scale_batch_norm1d(
    x: Tensor,
    linear: nn.Linear,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    *,
    precision: str | None = None,
    strict: bool = False,
) -> Tensor:
    """bn(linear(x) * scale) for existing layers, fused as far as their mode allows.

    With running statistics and `bn` in eval mode, one kernel computes all of it
    (`epigemm.linear_scale_batch_norm`). Where BatchNorm uses the batch's own statistics (training mode, or no
    running ones), product, bias and scale are one kernel and `bn` itself
    follows: statistics, `num_batches_tracked`, `momentum=None` and errors are torch's own.

    Args:
        x: `[M, K]`.
        linear: the matrix product and its bias.
        scale: `[N]` or None for 1.
        bn: over N features.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.

    Returns:
        `[M, N]`. Under autocast it has the autocast dtype, where unfused PyTorch promotes to the dtype of
        `scale`.

    Raises:
        ValueError: x is not 2-D (BatchNorm1d takes dimension 1 of a 3-D tensor, a linear layer the last one).
    """
    if x.dim() != 2:
        raise ValueError(f"x: got shape {list(x.shape)}; accepted is [M, K] (2 dimensions)")
    weight, bias = linear.weight, linear.bias
    if bn.training or bn.running_mean is None or bn.running_var is None:
        if invariance.active and invariance.enabled():
            raise RuntimeError(
                "bn: got one that normalises by the batch's own statistics in the batch-invariant mode, where no row "
                "may depend on others; accepted there are running statistics and eval()"
            )
        scaling = (bias, scale, None, None, None, None)
        result: Tensor = bn(
            _call.linear_folded(x, weight, scaling, 0.0, precision, None, strict, _pack_use(weight))
        )
        return result
    vectors = (bias, scale, bn.running_mean, bn.running_var, bn.weight, bn.bias)
    return _call.linear_folded(x, weight, vectors, bn.eps, precision, None, strict, _pack_use(weight))


class LinearScaleBatchNorm1d(nn.Module):
    """bn(linear(x) * scale): a linear layer, a learned scale per column and BatchNorm.

    What is fused in which mode: see `linear_scale_batch_norm1d`. State: `linear.weight`, `linear.bias`, `scale`,
    and all of `nn.BatchNorm1d`'s under `bn.`. Random numbers are drawn in that order: `nn.Linear`'s
    initialisation, then `scale` from the standard normal distribution.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the linear layer has one.
        eps: BatchNorm's epsilon.
        momentum: BatchNorm's momentum; None for the cumulative average.
        affine: whether BatchNorm has a weight and a bias.
        track_running_stats: whether there are running statistics; without them, eval mode uses the batch's
            own, too.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.
        device: where the parameters live.
        dtype: their type.

    Shape:
        `[M, K]` to `[M, N]`.

    Example:
        >>> epigemm.nn.LinearScaleBatchNorm1d(64, 32).eval()(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    scale: Tensor | None
    strict: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(out_features, device=device, dtype=dtype))
        self.bn = nn.BatchNorm1d(
            out_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.precision = precision
        self.strict = strict

    @classmethod
    def from_layers(
        cls,
        linear: nn.Linear,
        scale: Tensor | None,
        bn: nn.BatchNorm1d,
        *,
        precision: str | None = None,
        strict: bool = False,
    ) -> LinearScaleBatchNorm1d:
        """The fused layer over existing layers, which it shares.

        A `scale` that is no Parameter becomes a buffer of the same name.
        """
        for name, layer, accepted in (("linear", linear, nn.Linear), ("bn", bn, nn.BatchNorm1d)):
            if not isinstance(layer, accepted):
                raise TypeError(
                    f"{name}: got {type(layer).__name__}; accepted is a torch.nn.{accepted.__name__}"
                )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.linear = linear
        if isinstance(scale, nn.Parameter):
            module.scale = scale
        else:
            module.register_buffer("scale", scale)
        module.bn = bn
        module.precision = precision
        module.strict = strict
        module.training = bn.training
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return linear_scale_batch_norm1d(
            x, self.linear, self.scale, self.bn, precision=self.precision, strict=self.strict
        )

    def repack(self) -> None:
        """Split the linear layer's weight into fp16 pieces again, as `LinearReLU.repack` does."""
        packs.repack(self.linear.weight, self.precision)

    def extra_repr(self) -> str:
        """What the submodules do not print."""
        scale = "None" if self.scale is None else f"[{self.scale.shape[0]}]"
        return f"scale={scale}{_call_repr(self.precision, self.strict)}"


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
