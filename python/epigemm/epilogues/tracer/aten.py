"""The operators of ATen that an epilogue may be made of, by name, and those whose refusal names them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from epigemm.epilogues.tracer.program import words

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
"""Beside those that may be results: `reductions.OPERATORS`."""
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
