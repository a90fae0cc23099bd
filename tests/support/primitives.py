"""Functions of PyTorch that an epilogue may be made of: what they are, how exact, and points to try them at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import PerColumn
from epigemm.epilogues.tracer.program import words

NAN = float("nan")
SPECIAL = [
    float(each)
    for each in words(
        "0 -0.0 1 -1 0.5 -0.5 1.5 2.5 -2.5 3 -3 6 20 20.5 -20 88.5 89.5 -89.5 -104 0.25 0.95 -0.95 9.99 10 -0.3 "
        "1e-6 -1e-6 1e-30 3e-39 -3e-39 700.5 -745 1e4 -1e4 65519 65520 6e-5 6e-8 1e30 -1e30 3.4e38 inf -inf nan"
    )
]
# Functions of one argument: name -> how many units in the last place the library and torch may differ by.
UNARY: dict[str, float] = {
    **dict.fromkeys(words("neg abs sign relu round trunc floor ceil reciprocal detach"), 0.0),
    **dict.fromkeys(
        words("sigmoid tanh exp exp2 expm1 sqrt log log2 log10 log1p rsqrt sin cos tan asin"), 4.0
    ),
    **dict.fromkeys(words("acos atan sinh cosh asinh acosh atanh erf erfc"), 4.0),
    **dict.fromkeys(words("erfinv lgamma digamma i0 sinc"), 8.0),
}
BINARY: dict[str, float] = {
    **dict.fromkeys(
        words("add sub mul div maximum minimum fmin fmax fmod remainder copysign floor_divide"), 0.0
    ),
    **dict.fromkeys(words("pow atan2 hypot xlogy logaddexp logaddexp2"), 4.0),
}
PREDICATES = dict.fromkeys(words("isnan isinf isfinite signbit logical_not"), 1) | dict.fromkeys(
    words("eq ne lt le gt ge logical_and logical_or logical_xor"), 2
)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (F.gelu, 4.0),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 4.0),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), 0.0),
    "elu": (lambda x: F.elu(x, 1.5), 4.0),
    "selu": (F.selu, 4.0),
    "celu": (lambda x: F.celu(x, 2.0), 4.0),
    "silu": (F.silu, 4.0),
    "mish": (F.mish, 6.0),
    "softplus": (lambda x: F.softplus(x, 2.0, 5.0), 4.0),
    "softsign": (F.softsign, 1.0),
    "logsigmoid": (F.logsigmoid, 4.0),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 2.5), 0.0),
    "relu6": (F.relu6, 0.0),
    "hardsigmoid": (F.hardsigmoid, 1.0),
    "hardswish": (F.hardswish, 2.0),
    "hardshrink": (F.hardshrink, 0.0),
    "softshrink": (F.softshrink, 0.0),
    "tanhshrink": (F.tanhshrink, 4.0),
    "threshold": (lambda x: F.threshold(x, 0.5, -7.0), 0.0),
    "dropout_in_eval": (lambda x: F.dropout(x, 0.5, training=False), 0.0),
    "clamp": (lambda x: torch.clamp(x, -1.0, 2.5), 0.0),
    "clamp_min": (lambda x: torch.clamp(x, min=0.5), 0.0),
    "clamp_max": (lambda x: torch.clamp(x, max=0.5), 0.0),
    "clamp_reversed": (lambda x: torch.clamp(x, 2.0, -2.0), 0.0),
    "clamp_nan": (lambda x: torch.clamp(x, min=NAN), 0.0),
    # Bounds of zero, whose sign is not that of a zero between them.
    "clamp_to_zero": (lambda x: torch.clamp(x, -1.0, 0.0), 0.0),
    "clamp_from_zero": (lambda x: torch.clamp(x, 0.0, 1.0), 0.0),
    "clamp_min_zero": (lambda x: torch.clamp(x, min=0.0), 0.0),
    "clamp_min_minus_zero": (lambda x: torch.clamp(x, min=-0.0), 0.0),
    "clamp_max_zero": (lambda x: torch.clamp(x, max=0.0), 0.0),
    "clamp_max_minus_zero": (lambda x: torch.clamp(x, max=-0.0), 0.0),
    "hardtanh_to_zero": (lambda x: F.hardtanh(x, -1.0, 0.0), 0.0),
    "threshold_zero": (lambda x: F.threshold(x, 0.0, -0.0), 0.0),
    "elu_falling": (lambda x: F.elu(x, -1.5), 4.0),
    "leaky_relu_falling": (lambda x: F.leaky_relu(x, -0.5), 0.0),
    "nan_to_num": (torch.nan_to_num, 0.0),
    "nan_to_num_told": (lambda x: torch.nan_to_num(x, 0.5, 1.0, -2.0), 0.0),
    "square": (torch.square, 0.0),
    "cube": (lambda x: x**3, 1.0),
    "power_half": (lambda x: x**0.5, 1.0),
    "power_minus_one": (lambda x: x**-1.0, 0.0),
    "power_minus_two": (lambda x: x**-2.0, 2.0),
    "power_of_two": (lambda x: 2.0**x, 4.0),
    "quotient_of_number": (lambda x: 3.0 / x, 1.0),
    "rsub": (lambda x: 1 - x, 0.0),
    "frac": (torch.frac, 0.0),
    "half": (lambda x: x.half().float(), 0.0),
    "bfloat16": (lambda x: x.bfloat16().float(), 0.0),
    "half_product": (lambda x: (x.half() * 1.7).float(), 0.0),
    # Beside fp64 a cast to fp32 is a rounding.
    "float_product": (lambda x: x.float() * 1.7, 0.0),
    # Of an exact product: a contraction changes nothing.
    "float_difference": (lambda x: x.float() * 2 - 0.1, 0.0),
    "float_beside": (lambda x: x.to(torch.float32) * 0.3 + x, 1.0),
    "float_equal": (lambda x: torch.where(x.float() == 0.95, x.type(torch.float32).nan_to_num(), x), 0.0),
    "where_numbers": (lambda x: torch.where(x > 0, 1.0, -2.0) * x, 0.0),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -6e4), 0.0),
    "booleans": (lambda x: ((x > 0) & (x < 2) | ~(x > -1) ^ (x == 1)) * x + (x > 0).float(), 0.0),
    "isfinite_of": (lambda x: torch.isfinite(x) * 2.0, 0.0),
    "constant_half": (lambda x: x * 0.1 + torch.full_like(x, 0.3, dtype=torch.half).float(), 1.0),
    "logit": (lambda x: torch.logit(x, 1e-3), 4.0),
    "lerp_number": (lambda x: torch.lerp(x, x * x, 0.75), 2.0),
}
BINARY_MORE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), 1.0),
    "trunc_div": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), 0.0),
    "addcmul": (lambda a, b: torch.addcmul(a, b, a, value=2.0), 1.0),
    "addcdiv": (lambda a, b: torch.addcdiv(a, b, a + 0.5, value=0.5), 1.0),
    "alpha": (lambda a, b: torch.add(a, b, alpha=2.0) - torch.sub(a, b, alpha=0.5), 0.0),
    "clamp_tensor": (lambda a, b: torch.clamp(a, b, b + 1.0), 0.0),
    "where": (lambda a, b: torch.where(a > b, a, b * 2.0), 0.0),
    "gate": (lambda a, b: F.silu(a) * b, 4.0),
}


def functions() -> dict[str, tuple[Callable[..., Any], int, float]]:
    """Name -> the function of torch, its arguments, and the units that it may differ by."""
    found: dict[str, tuple[Callable[..., Any], int, float]] = {}
    for name, units in UNARY.items():
        found[name] = (getattr(torch, name), 1, units)
    for name, units in BINARY.items():
        found[name] = (getattr(torch, name), 2, units)
    found["heaviside"] = (torch.heaviside, 2, 0.0)
    for name, count in PREDICATES.items():
        found[name] = (_numbers_of(getattr(torch, name)), count, 0.0)
    for name, (function, units) in ACTIVATIONS.items():
        found[f"{name}_"] = (function, 1, units)
    for name, (binary, units) in BINARY_MORE.items():
        found[f"{name}_"] = (binary, 2, units)
    return found


def _numbers_of(predicate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def numbers(*given: Tensor) -> Tensor:
        return torch.where(predicate(*given), 1.0, 0.0)

    return numbers


FUNCTIONS = functions()


@functools.cache
def traced_of(name: str) -> Traced:
    function, arity, _ = FUNCTIONS[name]

    def one(acc: Tensor) -> Tensor:
        result = function(acc)
        assert isinstance(result, Tensor)
        return result

    def two(acc: Tensor, b: PerColumn) -> Tensor:
        result = function(acc, b)
        assert isinstance(result, Tensor)
        return result

    return trace(one if arity == 1 else two)


def points(arity: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Special points, every pair of them for two arguments, and random ones of all sizes."""
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    random = torch.randn(400, generator=generator, dtype=torch.float64)
    random = torch.cat([random, random * 10.0, random * torch.exp(8 * torch.randn(400, generator=generator))])
    if arity == 1:
        return (torch.cat([special, random]).to(dtype),)
    first, second = (axis.reshape(-1) for axis in torch.meshgrid(special, special, indexing="ij"))
    shuffled = random[torch.randperm(len(random), generator=generator)]
    return torch.cat([first, random]).to(dtype), torch.cat([second, shuffled]).to(dtype)
