"""Functions with a BatchNorm by its running statistics, which are folded. Conventions as of `epigemm.functional`."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm import docstrings
from epigemm import route as _route
from epigemm.arguments import autocast, checks, eight_bits
from epigemm.arguments.calls import Options, is_scaled, operand_dtype
from epigemm.epilogues.formulas import OF_VECTORS
from epigemm.epilogues.library import FUNCTIONS, SCALE_BATCH_NORM
from epigemm.epilogues.registry import FOLDED
from epigemm.packs.weight_packs import PackedWeight


@docstrings.of_linear
def linear_scale(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    scale: Tensor | None,
    *,
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = (x @ weight.T + bias) * scale, with a scale for each column.

    Matches `torch.nn.functional.linear(x, weight, bias) * scale`. The weight is not changed. Use it for a layer that a
    BatchNorm in training mode follows. On a GPU `scale * bias` is rounded to fp32 (fp64 for fp64), and where it is
    infinite the result may be NaN.

    Example:
        >>> epigemm.linear_scale(torch.randn(8, 64), torch.randn(32, 64), None, torch.randn(32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear_folded(
        x, weight, (bias, scale, None, None, None, None), 0.0, out, Options(precision, strict, scaled)
    )


@docstrings.of_linear
def linear_scale_batch_norm(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = (z * scale - running_mean) / sqrt(running_var + eps) * bn_weight + bn_bias,  z = x @ weight.T + bias.

    Matches `torch.nn.functional.batch_norm(torch.nn.functional.linear(x, weight, bias) * scale, running_mean,
    running_var, bn_weight, bn_bias, training=False, eps=eps)` for x of shape `[M, K]`. At every call the vectors are
    read on the device and folded into one multiply-add per element, in fp32 (fp64 for fp64). The weight is not changed.

    Example:
        >>> n = torch.rand(32)
        >>> epigemm.linear_scale_batch_norm(torch.randn(8, 64), torch.randn(32, 64), n, n, n, n, n, n).shape
        torch.Size([8, 32])
    """
    checks.running_statistics(running_mean, running_var)
    vectors = (bias, scale, running_mean, running_var, bn_weight, bn_bias)
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear_folded(x, weight, vectors, eps, out, Options(precision, strict, scaled))


@docstrings.of_linear
def linear_batch_norm_relu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = relu(batch_norm(x @ weight.T + bias)), with the running statistics.

    Matches `torch.relu(torch.nn.functional.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, eps=eps))` for
    `z = torch.nn.functional.linear(x, weight, bias)`. The vectors fold into one multiply-add per element.

    Example:
        >>> x, weight, zeros, ones = torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), torch.ones(32)
        >>> epigemm.linear_batch_norm_relu(x, weight, None, zeros, ones).shape
        torch.Size([8, 32])
    """
    weight = weight.weight if isinstance(weight, PackedWeight) else weight
    checks.tensors(x=x, weight=weight)
    statistics = {"running_mean": running_mean, "running_var": running_var}
    checks.optional_tensors(bias=bias, **statistics, bn_weight=bn_weight, bn_bias=bn_bias)
    checks.running_statistics(**statistics)
    vectors = (bias, None, running_mean, running_var, bn_weight, bn_bias)
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return batch_norm_relu(x, weight, vectors, eps, out, Options(precision, strict, scaled))


def batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    out: Tensor | None,
    options: Options,
) -> Tensor:
    """relu(multiplier * (x @ weight.T) + offset), both folded from `vectors` (those of `epilogues.FOLDED`).

    Where `route.adds_bias_first`, the bias is not folded.
    """
    if out is not None:
        checks.own_memory(out, x, [("weight", weight), *zip(FOLDED, vectors, strict=True)])
    if not checks.is_folded(vectors[3], eps):
        y = _route.linear_folded(x, weight, vectors, eps, out, options)
        return y.relu() if out is None else y.relu_()
    if not is_scaled(options.scaled):
        x, weight, (bias,) = autocast.cast(x, weight, vectors[0])
        checks.product(x, weight)  # before the fold, whose errors would name what it reads
        like = x
    else:
        bias, dtype = vectors[0], operand_dtype(eight_bits.checked(x, weight, options.scaled))
        like = x.new_empty(0, dtype=dtype)
    is_first = _route.adds_bias_first(x)
    vectors = (None if is_first else bias, *vectors[1:])
    folded = _route.fold(like, vectors, eps, weight.shape[0])
    operands = (bias if is_first else None, *folded)
    function = FUNCTIONS[OF_VECTORS]
    # The vectors do not promote the type, in PyTorch neither.
    return _route.linear(function, x, weight, operands, out, *options, promotes=False)


@docstrings.of_elementwise
def scale_batch_norm(
    x: Tensor,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """D = (x * scale - running_mean) / sqrt(running_var + eps) * bn_weight + bn_bias, vectors along the last dimension.

    Matches `torch.nn.functional.batch_norm(x * scale, running_mean, running_var, bn_weight, bn_bias,
    training=False, eps=eps)` for x of shape `[M, N]`.

    Example:
        >>> n = torch.ones(2)
        >>> epigemm.scale_batch_norm(torch.ones(1, 2), n, n, n, n, n)
        tensor([[1., 1.]])
    """
    checks.running_statistics(running_mean, running_var)
    fold = (None, scale, running_mean, running_var, bn_weight, bn_bias, eps)
    return _route.elementwise(SCALE_BATCH_NORM, x, (), out, fold)
