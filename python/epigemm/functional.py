"""The public functions.

Conventions of all functions: `x` is `[..., in_features]` (linear) or of any shape (elementwise), and `weight` is
`[out_features, in_features]`, as in `torch.nn.functional.linear`; or it has a matrix for each of x's, `[B,
out_features, in_features]` with an x `[B, rows, in_features]`, as in `torch.bmm`, and vectors are `[B, out_features]`.
Tensors are fp16, bf16, fp32 or fp64. `x`, `weight` and `bias` share one dtype, which is also the result's; a residual,
a gate and a `layer_scale` may be fp32 beside 16 bits. Sums and epilogues are computed in fp32 (in fp64 for fp64). A
fused kernel rounds the result once. In 16 bits the product, with its bias, is rounded to the tensors' dtype before the
epilogue in two cases, as in PyTorch: where PyTorch's GEMM computes it (where no fused kernel runs, and on CPUs), and
where gradients are recorded and the derivative needs the product (for example of the sigmoid), unless one kernel stores
the product beside the result. `bias=None` means no bias.

Keyword arguments:
    out: write the result to this tensor instead of allocating one. It must have the exact shape, dtype and device, and
        no argument may require a gradient. It may not overlap an input, except that an elementwise function may write
        x itself.
    precision: the arithmetic of an fp32 matrix product. None follows torch's settings
        (`torch.set_float32_matmul_precision`, `torch.backends.cuda.matmul.fp32_precision`; "none" and "ieee" there
        are "highest" here, "tf32" and "bf16" are "high"). "highest" keeps fp32's accuracy: three products of fp16
        slices on the tensor cores where these are at least as accurate as fp32 products and faster, else fp32
        products. "ieee" always gives fp32 products. "high" and "medium" allow TF32's error: one product of scaled fp16
        numbers, or a TF32 kernel where that is faster. "tf32" allows a TF32 kernel alone. If none of these runs,
        torch's GEMM does, with the arithmetic of torch's own setting. Under torch's "highest" or "ieee" that is fp32:
        more accurate and slower than asked for. So "high" and "medium" then try the products of "highest" first.
        Products in the derivative follow `precision`, too.
    x_scale, weight_scale, out_dtype, out_scale, accumulate: for an `x` and a `weight` of `float8_e4m3fn` (one of them
        may be `float8_e5m2`), whose elements stand for themselves times a scale. K is a multiple of 16. A scale is
        fp32: 0-d for the whole tensor, or a number for each row of x (`[M]`, x's leading shape, or torch's `[M, 1]`)
        or of the weight (`[N]`, `[1, N]`). Or both have scales of blocks, in any strides: `[M, ceil(K / 128)]`, one for
        128 columns of a row of x, and `[ceil(N / 128), ceil(K / 128)]`, one for 128 x 128 numbers of the weight; both
        are e4m3 then, and sums promoted. Scales are read on the device. The result has `out_dtype`, bf16 if that is
        None, and operands have its type, or fp32. `accumulate="promoted"` adds the tensor cores' sums of 128 products
        in fp32. "fast" leaves all sums to the tensor cores, which keep some 14 bits. There are no gradients. Where no
        fused kernel runs, `torch._scaled_mm` does, or a product in fp32.
        With `out_dtype=torch.float8_e4m3fn` the result is y / out_scale, saturated at 448; NaN stays NaN. Operands are
        bf16 or fp32. `out_scale` is a number > 0 or a 0-d fp32 tensor, which is read on the device and not checked; y
        is rounded once. With `out_scale="1x128"` each 128 columns of a row are a block, y is the bf16 result, and a
        block's scale is its largest magnitude, at least 2^-100, over 448; a NaN makes its block NaN. The call then
        returns a pair: the result, and the scales, fp32 `[..., ceil(N / 128)]`, as `torch._scaled_mm` reads them: those
        of consecutive rows lie side by side.
    strict: raise RuntimeError, before anything is launched, if no fused kernel would run. The message says why. Raise
        torch.OutOfMemoryError if there is no memory for fp16 slices; without `strict` an fp32 product would run then.

In the mode `epigemm.batch_invariant()` a row's bits do not depend on the other rows of x.

A weight may be an `epigemm.PackedWeight`, which has its fp16 slices. Calls that are given the weight itself use them,
too.

Errors: TypeError for arguments that are not tensors or numbers. ValueError for values out of range (unknown precision,
negative or non-finite eps, missing running statistics). RuntimeError for shapes, dtypes, devices and layouts that do
not fit, for `out=` with gradients, and by `strict`. All checks are made before anything is launched.

All functions are differentiable to any order in reverse mode, and `torch.compile(fullgraph=True)` can trace them. Under
`torch.func.grad`, `jvp` and what builds on them they run as plain PyTorch operations. Under autocast the linear
functions cast `x`, `weight` and `bias` to the autocast dtype, as `torch.nn.functional.linear` does, and the result has
the dtype that PyTorch promotes to: beside an fp32 operand (no number or 0-d tensor) it is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm import docstrings
from epigemm import route as _route
from epigemm.elementwise import bias_relu, relu_div, sigmoid, sigmoid_scale_residual
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.formulas import ACTIVATIONS, GATED
from epigemm.epilogues.library import (
    BIAS,
    BIAS_RELU,
    BIAS_SILU,
    BIAS_TANH,
    FUNCTIONS,
    RELU_DIV,
    SIGMOID_SCALE_RESIDUAL,
    gelu_epilogue,
)
from epigemm.folds import (
    linear_batch_norm_relu,
    linear_scale,
    linear_scale_batch_norm,
    scale_batch_norm,
)
from epigemm.packs.weight_packs import PackedWeight

__all__ = [
    "bias_relu",
    "linear",
    "linear_batch_norm_relu",
    "linear_gated",
    "linear_gelu",
    "linear_layer_scale_residual",
    "linear_relu",
    "linear_relu_div",
    "linear_residual",
    "linear_scale",
    "linear_scale_batch_norm",
    "linear_sigmoid_scale_residual",
    "linear_silu",
    "linear_tanh",
    "relu_div",
    "scale_batch_norm",
    "sigmoid",
    "sigmoid_scale_residual",
]

GATES = {each: FUNCTIONS[GATED + each] for each in ACTIVATIONS}
"""What multiplies an activation by a gate."""


@docstrings.of_linear
def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
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
    """D = x @ weight.T + bias.

    Matches `torch.nn.functional.linear(x, weight, bias)`.

    Example:
        >>> epigemm.linear(torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(BIAS, x, weight, (bias,), out, precision, strict, scaled)


@docstrings.of_linear
def linear_relu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
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
    """D = relu(x @ weight.T + bias).

    Matches `torch.relu(torch.nn.functional.linear(x, weight, bias))`; NaN stays NaN.

    Example:
        >>> epigemm.linear_relu(torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(BIAS_RELU, x, weight, (bias,), out, precision, strict, scaled)


@docstrings.of_linear
def linear_silu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
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
    """D = z * sigmoid(z),  z = x @ weight.T + bias.

    Matches `torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))`.

    Example:
        >>> epigemm.linear_silu(torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(BIAS_SILU, x, weight, (bias,), out, precision, strict, scaled)


@docstrings.of_linear
def linear_tanh(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
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
    """D = tanh(x @ weight.T + bias).

    Matches `torch.tanh(torch.nn.functional.linear(x, weight, bias))`.

    Example:
        >>> epigemm.linear_tanh(torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(BIAS_TANH, x, weight, (bias,), out, precision, strict, scaled)


@docstrings.of_linear
def linear_gelu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = gelu(x @ weight.T + bias).

    Matches `torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate=approximate)`.

    Example:
        >>> epigemm.linear_gelu(torch.randn(8, 64), torch.randn(32, 64), approximate="tanh").shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(gelu_epilogue(approximate), x, weight, (bias,), out, precision, strict, scaled)


@docstrings.of_linear
def linear_sigmoid_scale_residual(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    scale: float | Tensor = 1.0,
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
    """D = z + scale * sigmoid(z),  z = x @ weight.T + bias.

    Matches `z = torch.nn.functional.linear(x, weight, bias); torch.sigmoid(z) * scale + z`.

    Example:
        >>> epigemm.linear_sigmoid_scale_residual(torch.randn(8, 64), torch.randn(32, 64), scale=2.0).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(SIGMOID_SCALE_RESIDUAL, x, weight, (bias, scale), out, precision, strict, scaled)


@docstrings.of_linear
def linear_relu_div(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    divisor: float | Tensor = 1.0,
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
    """D = relu(x @ weight.T + bias) / divisor.

    Matches `torch.relu(torch.nn.functional.linear(x, weight, bias)) / divisor`; a divisor of 0 gives inf and
    NaN as there.

    Example:
        >>> epigemm.linear_relu_div(torch.randn(8, 64), torch.randn(32, 64), divisor=2.0).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(RELU_DIV, x, weight, (bias, divisor), out, precision, strict, scaled)


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
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = x @ weight.T + bias + residual.

    Matches `torch.nn.functional.linear(x, weight, bias) + residual`. A fused kernel rounds once.

    Example:
        >>> epigemm.linear_residual(torch.randn(8, 64), torch.randn(32, 64), None, torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(FUNCTIONS["residual"], x, weight, (bias, residual), out, precision, strict, scaled)


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
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = activation(x @ weight.T + bias) * gate: the gated layers of transformers (SwiGLU, GeGLU, ...).

    Matches `torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)) * gate`. A fused kernel rounds once.

    Example:
        >>> epigemm.linear_gated(torch.randn(8, 64), torch.randn(32, 64), None, torch.randn(8, 32)).shape
        torch.Size([8, 32])
    """
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(gate_function(activation), x, weight, (bias, gate), out, precision, strict, scaled)


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
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = residual + layer_scale * (x @ weight.T + bias).

    Matches `residual + layer_scale * torch.nn.functional.linear(x, weight, bias)`. A fused kernel rounds once.

    Example:
        >>> x, weight, residual = torch.randn(8, 64), torch.randn(32, 64), torch.randn(8, 32)
        >>> epigemm.linear_layer_scale_residual(x, weight, None, torch.full((32,), 1e-5), residual).shape
        torch.Size([8, 32])
    """
    operands = (bias, layer_scale, residual)
    scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return _route.linear(
        FUNCTIONS["layer_scale_residual"], x, weight, operands, out, precision, strict, scaled
    )


def gate_function(activation: str) -> Traced:
    """What multiplies this activation by a gate; TypeError unless a string, ValueError for an unknown name."""
    if not isinstance(activation, str):
        raise TypeError(f"activation: got {type(activation).__name__}; accepted are {', '.join(ACTIVATIONS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; accepted are {', '.join(ACTIVATIONS)}")
    return GATES[activation]
