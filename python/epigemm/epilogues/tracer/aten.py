"""The operators of ATen that an epilogue may be made of, by name, and those whose refusal names them."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.epilogues.tracer.program import words
from epigemm.epilogues.tracer.results import ACCEPTED, AMAX, AMIN, MEAN, SUM, VAR, Result

UNARY = words(
    "neg reciprocal abs sign relu sigmoid tanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt erf erfc "
    "erfinv sin cos tan asin acos atan sinh cosh asinh acosh atanh round trunc floor ceil lgamma digamma "
    "i0 detach sinc"
)
BINARY = words(
    "maximum minimum fmin fmax pow atan2 hypot fmod remainder copysign xlogy logaddexp logaddexp2 heaviside"
)
PREDICATES = dict.fromkeys(["isnan", "isinf", "isfinite", "signbit", "logical_not"], 1) | dict.fromkeys(
    ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"], 2
)
BITWISE = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
}
SAME_VALUES = words(
    "view _unsafe_view reshape expand unsqueeze squeeze alias clone lift_fresh lift_fresh_copy contiguous"
)
SUPPORTED = (
    "pointwise functions of floating-point values (arithmetic, comparisons, where, clamp, exp, tanh, gelu and so on: "
    "docs/epilogues.md lists them)"
)
ON_SCALARS = (
    "a Scalar is a symbolic number, with + - * / ** % abs, torch.sym_max and torch.sym_min, and an argument of "
    "functions that take numbers (docs/epilogues.md); torch.full_like(acc, s) makes a tensor of it"
)
_MOVES = "{name} moves elements; an epilogue sees one element at a time, and has no other"
_ITERATES = "{name}, or iterating over a tensor, takes it apart; an epilogue sees one element at a time"
NO_FUNCTOR = {
    **dict.fromkeys(words("roll flip fliplr flipud rot90 sort argsort topk msort gather"), _MOVES),
    **dict.fromkeys(words("unbind split chunk tensor_split"), _ITERATES),
    "__len__": "len reads the shape of a tensor; an epilogue is traced once, for all sizes",
    "prelu": "{name} is not supported; use torch.where(acc > 0, acc, slope * acc) with an operand slope: PerColumn",
    "batch_norm": "{name} is not supported; in eval it is acc * multiplier + offset, two operands PerColumn",
    "isclose": "{name} is not supported; use torch.abs(a - b) <= a bound",
}
"""Functions that are refused by the name under which the user calls them. An error about their parts would name
operators that the user has not written."""
REDUCTIONS = words(
    "prod max min std norm linalg_vector_norm argmax argmin any all cumsum cumprod logsumexp _softmax "
    "_log_softmax native_layer_norm native_group_norm median mode aminmax count_nonzero std_mean nansum"
)
"""Beside those that may be results: `OPERATORS`."""
INDEXING = words("select index index_select gather slice take masked_select nonzero diagonal narrow scatter")
PYTHON_OPERATORS: dict[Any, str] = {
    operator.neg: "neg",
    operator.abs: "abs",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.mod: "remainder",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
}


def symbolic_functions() -> dict[Any, str]:
    """Private functions of torch for symbolic numbers, if this version of torch has them."""
    names = words("sqrt sin cos tan tanh sinh cosh asin acos atan log2 exp log")
    return {getattr(torch, f"_sym_{name}"): name for name in names if hasattr(torch, f"_sym_{name}")}


# --- reductions: of the whole [M, N], along one axis, as results that nothing reads -----------------------------------


OPERATORS = {"sum": SUM, "mean": MEAN, "amax": AMAX, "amin": AMIN, "var": VAR, "var_mean": VAR}
"""Those that may be a result, by the name of the operator."""


class Refusal(Exception):
    """Why a node has no step; `trace` adds the place."""


def name_of(node: fx.Node) -> str:
    """The name of a node's operator; of an element of a pair, that of the pair's."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def reduced(node: fx.Node, arguments: list[Any], whole: tuple[int, int], hints: Any) -> tuple[Result, ...]:
    """The results of a reduction, their values still to come: of `var_mean` two, of the others one.

    `arguments`: by the operator's schema; `whole`: the sizes of `[M, N]`; `hints`: a tensor's sizes.

    Raises:
        Refusal: it is none of those that may be results.
    """
    name = name_of(node)
    source, axes, *_ = arguments if len(arguments) > 1 else (*arguments, None)
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or tuple(hints(value)) != whole:
        raise Refusal(f"{name} is a reduction of a tensor that is not [M, N]; supported are {ACCEPTED}")
    axes = axes if isinstance(axes, (list, tuple)) else [] if axes is None else [axes]
    if len(axes) != 1:
        raise Refusal(f"{name} is a reduction of all elements; supported are {ACCEPTED}")
    if not value.is_floating_point():
        raise Refusal(
            f"{name} is a reduction of {value.dtype}; accepted are numbers, as of torch.where(condition, 1.0, 0.0)"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise Refusal(
            f"{name} is a reduction of {value.dtype}; it is in fp32 (fp64 beside fp64): write float() before it"
        )
    by_name = {
        argument.name: given
        for argument, given in zip(node.target._schema.arguments, arguments, strict=False)  # type: ignore[union-attr]
    }
    if by_name.get("dtype") is not None:
        raise Refusal(
            f"{name} is a reduction with a dtype; accepted is none: it is in fp32 (fp64 beside fp64)"
        )
    correction = by_name.get("correction", 0.0)
    correction = 1.0 if correction is None else float(correction)
    common = Result(0.0, OPERATORS[name], int(axes[0]) % 2, bool(by_name.get("keepdim", False)), correction)
    mean = replace(common, kind=MEAN, comes_with_var=True)
    found = (common, mean) if name == "var_mean" else (common,)
    return tuple(replace(each, is_fp32=value.dtype is torch.float32) for each in found)
