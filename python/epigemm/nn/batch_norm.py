"""Linear layers with BatchNorm behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from epigemm import batch_statistics, docstrings, folds
from epigemm import route as _route
from epigemm.arguments import calls, checks, invariance
from epigemm.nn.base import CallOptions, Layer, Options, require_plain

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    running ones), a GPU makes three passes over the result: one writes the product with the mean and the variance of
    its columns, one reads it and writes what is returned. On a CPU, and where something other than autograd intercepts
    the call, product, bias and scale are one kernel and `bn` itself follows. Statistics, `num_batches_tracked`,
    `momentum=None` and errors are as torch's.

    Args:
        x: `[M, K]`.
        linear: the matrix product and its bias.
        scale: `[N]` or None for 1.
        bn: over N features.
        precision: see `epigemm.functional`.
        strict: see `epigemm.functional`.

    Returns:
        `[M, N]`. Under autocast it has the type that PyTorch promotes autocast's and that of `scale` to.

    Raises:
        TypeError: `linear` or `bn` is of another class, also of one that is derived from torch's.
        ValueError: one of the two has hooks, a `forward` of its own, or other parameters, buffers or modules; x is not
            2-D (BatchNorm1d takes dimension 1 of a 3-D tensor, a linear layer the last one).
    """
    require_plain("linear", linear)
    require_plain("bn", bn)
    return _scale_batch_norm(x, linear, scale, bn, precision, strict)


def _scale_batch_norm(
    x: Tensor,
    linear: nn.Linear,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    precision: str | None,
    strict: bool,
    *,
    relu: bool = False,
) -> Tensor:
    if not isinstance(x, Tensor):
        checks.tensors(x=x)
    if x.dim() != 2:
        raise ValueError(f"x: got shape {list(x.shape)}; accepted is [M, K] (2 dimensions)")
    weight, bias = linear.weight, linear.bias
    options = calls.Options(precision, strict)
    if bn.training or bn.running_mean is None or bn.running_var is None:
        if invariance.active and invariance.enabled():
            raise RuntimeError(
                "bn: got one that normalises by the batch's own statistics in the batch-invariant mode, where no row "
                "may depend on others; accepted there are running statistics and eval()"
            )
        found = batch_statistics.of_module(x, weight, bias, scale, bn, options, relu=relu)
        if found is not None:
            return found
        scaling = (bias, scale, None, None, None, None)
        result: Tensor = bn(_route.linear_folded(x, weight, scaling, 0.0, None, options))
        return torch.relu(result) if relu else result
    vectors = (bias, scale, bn.running_mean, bn.running_var, bn.weight, bn.bias)
    if relu:
        return folds.batch_norm_relu(x, weight, vectors, bn.eps, None, options)
    return _route.linear_folded(x, weight, vectors, bn.eps, None, options)


class _WithBatchNorm(Layer):
    """A linear layer, BatchNorm, perhaps a learned scale per column between them, and perhaps a ReLU behind them."""

    scale: Tensor | None
    _has_scale: ClassVar[bool] = False
    _has_relu: ClassVar[bool] = False

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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(options.pop("precision", None), options.pop("strict", False))
        made: Any = options
        self.linear = nn.Linear(in_features, out_features, bias, **made)
        if self._has_scale:
            self.scale = nn.Parameter(torch.randn(out_features, **made))
        self.bn = nn.BatchNorm1d(out_features, eps, momentum, affine, track_running_stats, **made)

    def _adopt(self, linear: nn.Linear, bn: nn.BatchNorm1d) -> None:
        columns = linear.weight.shape[0]
        if bn.num_features != columns:
            raise ValueError(
                f"bn: got num_features={bn.num_features}; accepted is {columns}, linear's out_features"
            )
        self.linear, self.bn, self.training = linear, bn, bn.training

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        scale = self.scale if self._has_scale else None
        return _scale_batch_norm(
            x, self.linear, scale, self.bn, self.precision, self.strict, relu=self._has_relu
        )

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does, and forget the running statistics."""
        self.linear.reset_parameters()
        if self._has_scale and isinstance(self.scale, nn.Parameter):
            nn.init.normal_(self.scale)
        self.bn.reset_parameters()


@docstrings.of_layer
class LinearScaleBatchNorm1d(_WithBatchNorm):
    """bn(linear(x) * scale): a linear layer, a learned scale per column and BatchNorm.

    What is fused in which mode: see `linear_scale_batch_norm1d`. State: `linear.weight`, `linear.bias`, `scale`,
    and all of `nn.BatchNorm1d`'s under `bn.`. Random numbers are drawn in that order: `nn.Linear`'s
    initialisation, then `scale` from the standard normal distribution.

    Example:
        >>> epigemm.nn.LinearScaleBatchNorm1d(64, 32).eval()(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _has_scale = True
    _epilogue_name = "scale_batch_norm"

    @classmethod
    def from_layers(
        cls,
        linear: nn.Linear,
        scale: Tensor | None,
        bn: nn.BatchNorm1d,
        **options: Unpack[CallOptions],
    ) -> LinearScaleBatchNorm1d:
        """The fused layer over existing layers, which it shares.

        A `scale` that is no Parameter becomes a buffer of the same name.
        """
        module = cls._over({"linear": linear, "bn": bn}, options)
        module._share("scale", scale)
        return module

    def extra_repr(self) -> str:
        """What the submodules do not print."""
        scale = "None" if self.scale is None else f"[{self.scale.shape[0]}]"
        return f"scale={scale}, {super().extra_repr()}"


@docstrings.of_layer
class LinearBatchNormReLU(_WithBatchNorm):
    """relu(bn(linear(x))): a linear layer, BatchNorm and a ReLU.

    With running statistics and in eval mode, one kernel (`epigemm.linear_batch_norm_relu`); where BatchNorm uses the
    batch's own statistics, as `linear_scale_batch_norm1d`, and the ReLU is a part of the last pass. State:
    `linear.weight`, `linear.bias`, and all of `nn.BatchNorm1d`'s under `bn.`.

    Example:
        >>> epigemm.nn.LinearBatchNormReLU(64, 32).eval()(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    _has_relu = True
    _epilogue_name = "batch_norm_relu"

    @classmethod
    def from_layers(
        cls, linear: nn.Linear, bn: nn.BatchNorm1d, **options: Unpack[CallOptions]
    ) -> LinearBatchNormReLU:
        """The fused layer over existing layers, which it shares."""
        return cls._over({"linear": linear, "bn": bn}, options)
