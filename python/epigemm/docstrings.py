"""What the docstrings of the public functions have in common: their arguments, results and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[Any])

_SCALAR = "a number, or a 0-d floating tensor on x's device (read there, without synchronising; it may have a gradient)"
_SMALL_EPS = "Below 2^-126 nothing is folded: PyTorch's `batch_norm` computes the result."
_SHARED = {
    "bias": "`[N]` or None.",
    "scale": "`[N]`, of x's dtype or fp32 (fp64 beside fp64), or None for 1.",
    "running_mean": "`[N]`, like every vector of x's dtype or fp32 (fp64 beside fp64).",
    "running_var": "`[N]`.",
    "bn_weight": "`[N]` or None for 1 (`affine=False`).",
    "bn_bias": "`[N]` or None for 0.",
    "eps": f"a finite number >= 0. {_SMALL_EPS}",
    "activation": '"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh" or "identity" (none).',
    "approximate": '"none": with erf; or "tanh".',
    "precision": "see `epigemm.functional`.",
    "strict": "see `epigemm.functional`.",
    "x_scale": "of an x of 8 bits: fp32, 0-d, `[M]` or `[M, ceil(K / 128)]`. See `epigemm.functional`.",
    "weight_scale": "of a weight of 8 bits: fp32, 0-d, `[N]` or `[ceil(N / 128), ceil(K / 128)]`.",
    "out_dtype": "of a result of 8 bits: bf16 (None), fp16, fp32 or e4m3.",
    "out_scale": 'of an e4m3 result: a number, 0-d fp32, or "1x128", which gives a pair: the result and its scales.',
    "accumulate": 'of 8 bits: "promoted" or "fast".',
}
_LINEAR = {
    "x": "`[..., K]`.",
    "weight": "`[N, K]`, a tensor or an `epigemm.PackedWeight`.",
    "weight2": "`[N, K]`, as weight. Without it weight has 2N rows.",
    "bias2": "`[N]` or None; only with weight2. Without weight2 bias has 2N elements.",
    "residual": "of the result's shape, or `[B, 1, N]` beside a result `[B, L, N]`.",
    "gate": "of the result's shape, or `[B, 1, N]` beside a result `[B, L, N]`.",
    "layer_scale": "`[N]`.",
    "out": "`[..., N]`, see `epigemm.functional`.",
}
_ELEMENTWISE = {"out": "of x's shape; x itself to compute in place."}
_MODULE = _SHARED | {
    "in_features": "K.",
    "out_features": "N.",
    "bias": "whether the linear layer has one.",
    "epilogue": "an epilogue made by `epigemm.epilogue`.",
    "scale": "a number, or a 0-d tensor (an `nn.Parameter` is learned).",
    "divisor": "a number, or a 0-d tensor (an `nn.Parameter` is learned).",
    "init_values": "the initial value of each element of `layer_scale`.",
    "eps": f"BatchNorm's epsilon. {_SMALL_EPS}",
    "momentum": "BatchNorm's momentum; None for the cumulative average.",
    "affine": "whether BatchNorm has a weight and a bias.",
    "track_running_stats": "whether there are running statistics; without them, eval mode uses the batch's own, too.",
    "device": "the parameters' device.",
    "dtype": "the parameters' type.",
}
_MODULE_OPTIONS = ("precision", "strict", "device", "dtype")  # in signatures `**options`
_FITS = "a shape, dtype, device or layout that does not fit; `out` overlaps an input"
_NO_TENSOR = "an argument is not a tensor (or None where that is accepted)"


def of_linear(function: _Function) -> _Function:
    """Complete the docstring of a linear function: Args, Returns and Raises, ahead of its Example."""
    values = ["unknown precision"]
    if "accumulate" in inspect.signature(function).parameters:
        values.append("unknown out_dtype, accumulate or out_scale")
    errors = {
        "TypeError": f"{_NO_TENSOR}, or `precision` is not a string",
        "RuntimeError": f"{_FITS} or itself, or is\n"
        "        given where a gradient is needed; or `strict` is True, and no fused kernel would run",
    }
    return _complete(function, _LINEAR, "`[..., N]`, contiguous.", values, errors)


def of_elementwise(function: _Function) -> _Function:
    """The same for an elementwise function."""
    errors = {
        "TypeError": _NO_TENSOR,
        "RuntimeError": f"{_FITS} without being x,\n"
        "        or itself, or is given where a gradient is needed",
    }
    vectors = {"bias", "running_mean"} & set(inspect.signature(function).parameters)
    x = {"x": "`[..., N]`." if vectors else "any shape and layout."}
    return _complete(function, x | _ELEMENTWISE, "A tensor laid out as `torch.empty_like(x)`.", [], errors)


def of_layer(layer: _Class) -> _Class:
    """Complete the docstring of a layer: Args and Shape, ahead of Raises and Example."""
    names = [name for name in inspect.signature(layer).parameters if name in _MODULE]
    names = [*dict.fromkeys((*names, *_MODULE_OPTIONS))]
    shape = "`[M, K]` to `[M, N]`." if "momentum" in names else "`[..., K]` to `[..., N]`."
    sections = {"Args": [f"{name}: {_MODULE[name]}" for name in names], "Shape": [shape]}
    layer.__doc__ = _with_sections(
        layer.__doc__, sections, "Raises:" if "Raises:" in (layer.__doc__ or "") else "Example:"
    )
    return layer


def _with_sections(doc: str | None, sections: dict[str, list[str]], before: str) -> str | None:
    if doc is None:  # under python -OO
        return None
    text, rest = inspect.cleandoc(doc).split(before, 1)
    lines = [f"{title}:\n" + "".join(f"    {line}\n" for line in of) for title, of in sections.items()]
    return "\n".join([text, *lines, f"{before}{rest}"]).replace("\n\n\n", "\n\n")


def _complete(
    function: _Function, own: dict[str, str], returns: str, values: list[str], errors: dict[str, str]
) -> _Function:
    arguments = _SHARED | own
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default == 1.0:
            arguments[name] = f"{_SCALAR}."
            errors["TypeError"] += f",\n        or {name} neither a number nor a tensor"
        if name in ("approximate", "activation"):
            values.append(f"unknown {name}")
        if name == "eps":
            values += ["negative or non-finite eps", "missing running statistics"]
    if values:
        errors = {"TypeError": errors["TypeError"], "ValueError": "; ".join(values), **errors}
    sections = {
        "Args": [f"{name}: {arguments[name]}" for name in inspect.signature(function).parameters],
        "Returns": [returns],
        "Raises": [f"{error}: {when}." for error, when in errors.items()],
    }
    function.__doc__ = _with_sections(function.__doc__, sections, "Example:")
    return function
