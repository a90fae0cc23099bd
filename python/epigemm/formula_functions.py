"""The public functions whose epilogue reads a matrix, and BatchNorm with ReLU. Conventions as of `epigemm.functional`.

Their epilogues (`epigemm.epilogues.formulas`) run like a user's function: with a 16-bit x, operands may be fp32.
"""

from __future__ import annotations

from torch import Tensor

from epigemm import docstrings
from epigemm import route as _route
from epigemm.arguments import checks
from epigemm.epilogues.formulas import ACTIVATIONS, GATED, OF_VECTORS
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import FOLDED
from epigemm.packs.weight_packs import KEEP, PackedWeight

__all__ = ["linear_batch_norm_relu", "linear_gated", "linear_layer_scale_residual", "linear_residual"]


def checked_activation(activation: str) -> str:
    """The name of a gate's activation; TypeError unless a string, ValueError for an unknown name."""
    if not isinstance(activation, str):
        raise TypeError(f"activation: got {type(activation).__name__}; accepted are {', '.join(ACTIVATIONS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; accepted are {', '.join(ACTIVATIONS)}")
    return activation


def batch_norm_relu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    out: Tensor | None,
    precision: str | None,
    strict: bool,
    pack_use: str | None = None,
) -> Tensor:
    """relu(multiplier * (x @ weight.T) + offset), both folded from `vectors` (those of `epilogues.FOLDED`).

    Where `route.adds_bias_first`, the bias is not folded.
    """
    if isinstance(weight, PackedWeight):
        weight, pack_use = weight.weight, KEEP
    if out is not None:
        checks.own_memory(out, x, [("weight", weight), *zip(FOLDED, vectors, strict=True)])
    if not checks.is_folded(vectors[3], eps):
        y = _route.linear_folded(x, weight, vectors, eps, precision, out, strict, pack_use)
        return y.relu() if out is None else y.relu_()
    x, weight, (bias,) = _route.autocast(x, weight, vectors[0])
    checks.product(x, weight)  # before the fold, whose errors would name what it reads
    is_first = _route.adds_bias_first(x)
    vectors = (None if is_first else bias, *vectors[1:])
    folded = _route.fold(x, vectors, eps, weight.shape[0])
    operands = (bias if is_first else None, *folded)
    function = FUNCTIONS[OF_VECTORS]
    # The vectors do not promote the type, in PyTorch neither.
    return _route.linear(function, x, weight, operands, precision, out, strict, pack_use, promotes=False)


@docstrings.of_linear
def linear_residual(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    residual: Tensor,
    *,
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
) -> Tensor:
    """D = x @ weight.T + bias + residual.

    Matches `torch.nn.functional.linear(x, weight, bias) + residual`. A fused kernel rounds once.

    Example:
        >>> epigemm.linear_residual(torch.randn(8, 64), torch.randn(32, 64), None, torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """
    return _route.linear(FUNCTIONS["residual"], x, weight, (bias, residual), precision, out, strict)


@docstrings.of_linear
def linear_gated(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    gate: Tensor,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
) -> Tensor:
    """D = activation(x @ weight.T + bias) * gate: the gated layers of transformers (SwiGLU, GeGLU, ...).

    Matches `torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)) * gate`. A fused kernel rounds once.

    Example:
        >>> epigemm.linear_gated(torch.randn(8, 64), torch.randn(32, 64), None, torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """
    function = FUNCTIONS[GATED + checked_activation(activation)]
    return _route.linear(function, x, weight, (bias, gate), precision, out, strict)


@docstrings.of_linear
def linear_layer_scale_residual(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    layer_scale: Tensor,
    residual: Tensor,
    *,
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
) -> Tensor:
    """D = residual + layer_scale * (x @ weight.T + bias).

    Matches `residual + layer_scale * torch.nn.functional.linear(x, weight, bias)`. A fused kernel rounds once.

    Example:
        >>> x, weight, residual = torch.randn(8, 64), torch.randn(32, 64), torch.randn(8, 32)
        >>> epigemm.linear_layer_scale_residual(x, weight, None, torch.full((32,), 1e-5), residual).shape
        torch.Size([8, 32])
    """
    operands = (bias, layer_scale, residual)
    return _route.linear(FUNCTIONS["layer_scale_residual"], x, weight, operands, precision, out, strict)


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
) -> Tensor:
    """D = relu(batch_norm(x @ weight.T + bias)), with the running statistics.

    Matches `torch.relu(torch.nn.functional.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, eps=eps))` for
    `z = torch.nn.functional.linear(x, weight, bias)`. The vectors fold into one multiply-add per element.

    Example:
        >>> x, weight, zeros, ones = torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), torch.ones(32)
        >>> epigemm.linear_batch_norm_relu(x, weight, None, zeros, ones).shape
        torch.Size([8, 32])
    """
    plain = weight.weight if isinstance(weight, PackedWeight) else weight
    checks.tensors(x=x, weight=plain)
    statistics = {"running_mean": running_mean, "running_var": running_var}
    checks.optional_tensors(bias=bias, **statistics, bn_weight=bn_weight, bn_bias=bn_bias)
    checks.running_statistics(**statistics)
    vectors = (bias, None, running_mean, running_var, bn_weight, bn_bias)
    return batch_norm_relu(x, weight, vectors, eps, out, precision, strict)
