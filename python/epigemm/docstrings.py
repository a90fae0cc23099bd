"""What the docstrings of the public functions have in common: their arguments, results and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SCALAR = "a number, or a 0-d floating tensor on x's device (read there, without synchronising; gradients flow to it)"
_SHARED = {
    "bias": "`[N]` or None.",
    "scale": "`[N]`, of x's dtype or fp32 (fp64 beside fp64), or None for 1.",
    "running_mean": "`[N]`, like every vector of x's dtype or fp32 (fp64 beside fp64).",
    "running_var": "`[N]`.",
    "bn_weight": "`[N]` or None for 1 (`affine=False`).",
    "bn_bias": "`[N]` or None for 0.",
    "eps": "a finite number >= 0.",
}
_LINEAR = {
    "x": "`[..., K]`.",
    "weight": "`[N, K]`, a tensor or an `epigemm.PackedWeight`.",
    "residual": "of the result's shape.",
    "gate": "of the result's shape.",
    "layer_scale": "`[N]`.",
    "activation": '"silu", "gelu", "gelu_tanh", "relu", "sigmoid" or "tanh".',
    "approximate": '"none": with erf; or "tanh".',
    "out": "`[..., N]`, see the module's page.",
    "precision": "see the module's page.",
    "strict": "see the module's page.",
}
_ELEMENTWISE = {"out": "x's shape; x itself for in place."}
_FITS = "a shape, dtype, device or layout that does not fit; `out` overlaps an input"
_NO_TENSOR = "an argument is no tensor (or None where that is accepted)"


def linear(function: _Function) -> _Function:
    """Complete the docstring of a linear function: Args, Returns and Raises, ahead of its Example."""
    values = ["unknown precision"]
    errors = {
        "TypeError": f"{_NO_TENSOR}, or the precision no string",
        "RuntimeError": f"{_FITS} or itself, or is\n"
        "        given where a gradient is needed; `strict`, and no fused kernel would run",
    }
    return _complete(function, _LINEAR, "`[..., N]`, contiguous.", values, errors)


def elementwise(function: _Function) -> _Function:
    """The same for an elementwise function."""
    errors = {
        "TypeError": _NO_TENSOR,
        "RuntimeError": f"{_FITS} without being x,\n"
        "        or itself, or is given where a gradient is needed",
    }
    vectors = {"bias", "running_mean"} & set(inspect.signature(function).parameters)
    x = {"x": "`[..., N]`." if vectors else "any shape and layout."}
    return _complete(function, x | _ELEMENTWISE, "A tensor laid out as `torch.empty_like(x)`.", [], errors)


def _complete(
    function: _Function, own: dict[str, str], returns: str, values: list[str], errors: dict[str, str]
) -> _Function:
    if function.__doc__ is None:  # under python -OO
        return function
    text, example = inspect.cleandoc(function.__doc__).split("Example:")
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
    lines = [f"{title}:\n" + "".join(f"    {line}\n" for line in of) for title, of in sections.items()]
    function.__doc__ = "\n".join([text, *lines, f"Example:{example}"]).replace("\n\n\n", "\n\n")
    return function
