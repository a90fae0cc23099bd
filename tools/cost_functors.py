"""Functors to measure: one for each primitive that a functor may be made of, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.decorator import UserEpilogue
from epigemm.epilogues.declaration import traced
from epigemm.epilogues.kinds import SCALAR, Operand
from epigemm.epilogues.tracer import source
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.epilogues.tracer.program import words

Primitive = Callable[[Tensor, Tensor], Tensor]
"""Of the accumulator, and of a number near 1 as a tensor."""

# Instructions as short as a product: how many of those they count as.
PLAIN = (
    dict.fromkeys(words("add sub mul maximum minimum clamp_min clamp_max relu where copysign"), 1)
    | dict.fromkeys(words("eq ne lt le gt ge isnan logical_and logical_or logical_xor signbit"), 1)
    | dict.fromkeys(words("clamp hardtanh leaky_relu fmin fmax sign isinf isfinite"), 2)
    | dict.fromkeys(words("heaviside to_bfloat16 softshrink"), 4)
    | dict.fromkeys(words("neg abs copy detach highest logical_not to_float"), 0)
)
_ANYWHERE = "sigmoid tanh exp exp2 expm1 erf erfc sin cos tan atan sinh cosh asinh sinc lgamma digamma i0"
_UNARY = {name: getattr(torch, name) for name in words(f"{_ANYWHERE} round trunc floor ceil")}
_POSITIVE = {name: getattr(torch, name) for name in words("log log2 log10 log1p sqrt rsqrt reciprocal")}
_WITHIN_ONE = {name: getattr(torch, name) for name in words("asin acos atanh erfinv")}
_BINARY = {
    name: getattr(torch, name) for name in words("atan2 hypot fmod remainder logaddexp logaddexp2 div")
}


def _of_one(function: Callable[[Tensor], Tensor]) -> Primitive:
    return lambda v, s: function(v)


def _of_positive(function: Callable[[Tensor], Tensor]) -> Primitive:
    return lambda v, s: function(torch.abs(v) + 0.5)


def _of_small(function: Callable[[Tensor], Tensor]) -> Primitive:
    return lambda v, s: function(torch.clamp(v, -0.9, 0.9))


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Primitive:
    return lambda v, s: function(v, v * s + 0.25)


PRIMITIVES: dict[str, Primitive] = {
    **{name: _of_one(function) for name, function in _UNARY.items()},
    **{name: _of_positive(function) for name, function in _POSITIVE.items()},
    **{name: _of_small(function) for name, function in _WITHIN_ONE.items()},
    **{name: _of_two(function) for name, function in _BINARY.items()},
    "acosh": lambda v, s: torch.acosh(torch.abs(v) + 1.0),
    "xlogy": lambda v, s: torch.xlogy(v, torch.abs(v) + 0.5),
    "pow": lambda v, s: torch.pow(torch.abs(v) + 0.5, v * s),
    "floor_div": lambda v, s: torch.div(v, v * s + 0.25, rounding_mode="floor"),
    "trunc_div": lambda v, s: torch.div(v, v * s + 0.25, rounding_mode="trunc"),
    "div_by_scalar": lambda v, s: v / s,
    "gelu": lambda v, s: F.gelu(v),
    "gelu_tanh": lambda v, s: F.gelu(v, approximate="tanh"),
    "elu": lambda v, s: F.elu(v),
    "softplus": lambda v, s: F.softplus(v),
    "to_half": lambda v, s: v.half().float(),
}
"""Those that take longer than a product, by their names in a program, at arguments that models have."""


@dataclass(frozen=True)
class Functor:
    """A functor of the accumulator and of one number, `times` of a primitive or a random one."""

    name: str
    epilogue: UserEpilogue
    text: str = ""

    @property
    def primitives(self) -> list[str]:
        """Their names, each as often as it is computed."""
        made = self.epilogue.traced
        return [name for name in source.primitives(made.program, made.kinds).split(",") if name]

    @property
    def has_short_forms(self) -> bool:
        """Whether it is computed with the short functions where the result is in bf16."""
        return short_number(self.epilogue.traced.program, ROUNDED_TO["bfloat16"]) is not None


def functor(name: str, function: Primitive, text: str = "") -> Functor:
    """A functor of a name that is an identifier."""
    return Functor(name, UserEpilogue(traced(function, (Operand(SCALAR, "s"),), name, name)), text)


def bare() -> Functor:
    """The functor next to which others are measured: a product with a number."""
    return functor("bare", lambda v, s: v * s)


def repeated(name: str, times: int) -> Functor:
    """A primitive `times` over, side by side: their greatest, so that errors are those of one."""

    def of_product(v: Tensor, s: Tensor) -> Tensor:
        for _ in range(1 + times):
            v = v * s
        return v

    def function(v: Tensor, s: Tensor) -> Tensor:
        v = v * s
        result = PRIMITIVES[name](v, s)
        for _ in range(times - 1):
            v = v * s
            result = torch.maximum(result, PRIMITIVES[name](v, s))
        return result

    return functor(f"{name}_{times}", of_product if name == "mul" else function)


_PLAIN_STEPS: dict[str, Primitive] = {
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - 0.5 * b,
    "greatest": torch.maximum,
    "choice": lambda a, b: torch.where(a > b, a, b * 0.5),
    "clamp": lambda a, b: torch.clamp(a, -4.0, 4.0) + b,
}


def random_functors(seed: int, count: int) -> list[Functor]:
    """Random expressions of 2 to 7 steps, half of them primitives that take longer than a product."""
    return [_random(random.Random(f"{seed} {number}"), f"random_{number}") for number in range(count)]


def _random(drawn: random.Random, name: str) -> Functor:
    steps: list[
        tuple[str, int]
    ] = []  # a primitive of the last value, or it and an earlier one in a plain step
    for number in range(drawn.randint(2, 7)):
        is_plain = number > 0 and drawn.random() < 0.5
        steps.append(
            (drawn.choice(sorted(_PLAIN_STEPS if is_plain else PRIMITIVES)), drawn.randrange(number + 1))
        )
    steps.append(("clamp", 0))

    def function(v: Tensor, s: Tensor) -> Tensor:
        values = [v * s]
        for step, earlier in steps:
            if step in _PLAIN_STEPS:
                values.append(_PLAIN_STEPS[step](values[-1], values[earlier]))
            else:
                values.append(PRIMITIVES[step](torch.clamp(values[-1], -4.0, 4.0), s))
        return values[-1]

    return functor(name, function, " ".join(f"{step}[{earlier}]" for step, earlier in steps))
