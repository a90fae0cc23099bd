"""Which short functions a functor may take whose result is rounded to 16 bits: of `Rounded`, for bf16 also its own.

These are off by some units in fp32's last place: 2^-24 of their result, where fp16 rounds by up to 2^-11 and bf16 by up
to 2^-8. Products, quotients and choices keep such an error as it is. A sum whose terms cancel, such as z - tanh(z),
makes it larger, and so may other functions. So a program is followed step by step, and takes more accurate functions,
for all its steps, where an error of more than `FEW` units meets a step that may enlarge it, where the errors of factors
add up to more than `most`, and where a whole number is made of something inexact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epigemm.epilogues.tracing.program import Program, Ref, Step, Value, words

FEW = 64  # so much a few steps of fp32 may lose, too
UNITS = {
    # One instruction, or an exponential made of one; those of exp where fp16 has its result.
    **dict.fromkeys(words("div reciprocal sqrt rsqrt exp2"), 2),
    **dict.fromkeys(words("exp sigmoid"), 16),
    # csrc/epilogue/primitives/short_angles.h: up to 2^-19 from angles of at most 1e5, atan2 2^-18.
    **dict.fromkeys(words("sin cos tan"), 32),
    "sinc": 36,
    # csrc/epilogue/primitives/short.h: up to 2^-18; pow, where fp16 has its result; up to 2^-17, log1p 2^-16.
    "hypot": 8,
    **dict.fromkeys(words("atan2 asinh acosh atanh pow"), 64),
    **dict.fromkeys(words("tanh expm1 elu gelu gelu_tanh"), 128),
    **dict.fromkeys(words("log1p softplus"), 256),
}
"""How far the functions of `Rounded` are off. All others are float's."""
UNITS_OF_BFLOAT16 = {
    **UNITS,
    # csrc/epilogue/primitives/short_bfloat16.h: up to 2^-10.98, 2^-11.39 and 2^-11.3.
    "tanh": 8300,
    "gelu": 6400,
    **dict.fromkeys(words("expm1 elu log1p softplus"), 6700),
}
"""And those of `RoundedToBFloat16`."""
KEEPING = frozenset(
    words(
        "mul div neg abs reciprocal sqrt rsqrt tanh relu leaky_relu maximum minimum fmin fmax clamp clamp_min "
        "clamp_max hardtanh copysign copy detach where isnan logical_not logical_and logical_or logical_xor"
    )
)
"""Their results are relatively no further off than what they are given: of factors, than all together."""
POWERS = {0.5: 2, 2.0: 0, 3.0: 0, -0.5: 2, -1.0: 2}
"""The units of powers that are products, roots and quotients. They have the base's error times their exponent."""
STEPS = frozenset(
    words(
        "trunc floor ceil round floor_div trunc_div fmod remainder sign heaviside "
        "eq ne lt le gt ge isinf isfinite signbit"
    )
)
"""Of a last bit before them these make a whole number."""
NEVER = frozenset(words("floor_div trunc_div logaddexp logaddexp2"))
"""Within these a quotient becomes a whole number, or a logarithm is in a sum."""

_ANY, _NOT_NEGATIVE, _NOT_POSITIVE = 0, 1, 2  # what a sign may be; of 0 the last two together
_POSITIVE = frozenset(words("exp exp2 sigmoid abs sqrt rsqrt relu softplus cosh erfc"))
_ODD = frozenset(words("tanh expm1 log1p gelu gelu_tanh erf atan asinh sinh copy detach"))  # they keep a sign


@dataclass(frozen=True)
class RoundedTo:
    """What results are rounded to."""

    most: int  # units that a result may be off by: a quarter of what it is rounded by
    numbers: Mapping[
        str, Mapping[str, int]
    ]  # the types of csrc/epilogue/rounded.h, shortest first, and their units


ROUNDED_TO = {
    "float16": RoundedTo(2048, {"Rounded": UNITS}),
    "bfloat16": RoundedTo(16384, {"RoundedToBFloat16": UNITS_OF_BFLOAT16, "Rounded": UNITS}),
}


def short_number(program: Program, rounded_to: RoundedTo) -> str | None:
    """The type with the shortest functions whose result is, up to `most` units, that by accurate ones; None: float."""
    for number, units in rounded_to.numbers.items():
        if _may_be_short(program, units, rounded_to.most):
            return number
    return None


def _may_be_short(program: Program, units: Mapping[str, int], most: int) -> bool:
    errors: dict[Value, float] = {}  # in units
    signs: dict[Value, int] = {}
    for number, step in enumerate(program.steps, program.operands + 1):
        given = [errors.get(value, 0.0) if isinstance(value, Ref) else 0.0 for value in step.inputs]
        terms = [
            signs.get(value, _ANY) if isinstance(value, Ref) else _of_number(value) for value in step.inputs
        ]
        if step.op == "sub":
            terms[1] = _opposite(terms[1])
        worst = max(given, default=0.0)
        if step.op in NEVER or (step.op in STEPS and worst > 0):
            return False
        exponent = step.inputs[1] if step.op == "pow" else None
        is_power = isinstance(exponent, float) and exponent in POWERS
        is_of_one_sign = step.op in ("add", "sub") and bool(terms[0] & terms[1])
        if worst > FEW and not (step.op in KEEPING or is_power or is_of_one_sign):
            return False
        error = units.get(step.op, 0) + (sum(given) if step.op in ("mul", "div") else worst)
        if is_power and isinstance(exponent, float):
            error = POWERS[exponent] + abs(exponent) * given[0]
        if error > most:
            return False
        errors[Ref(number)], signs[Ref(number)] = error, _sign(step, terms)
    return True


def _of_number(value: float) -> int:
    return (_NOT_NEGATIVE if value >= 0 else _ANY) | (_NOT_POSITIVE if value <= 0 else _ANY)


def _opposite(sign: int) -> int:
    return {_NOT_NEGATIVE: _NOT_POSITIVE, _NOT_POSITIVE: _NOT_NEGATIVE}.get(sign, sign)


def _sign(step: Step, given: Sequence[int]) -> int:
    """Of a step's result, by those of what it is given (of what is subtracted, the opposite)."""
    if step.op in _POSITIVE or (step.op == "mul" and step.inputs[0] == step.inputs[1]):
        return _NOT_NEGATIVE
    if step.op in _ODD:
        return given[0]
    if step.op == "neg":
        return _opposite(given[0])
    if step.op in ("mul", "div"):
        if given[1] == _NOT_POSITIVE:
            return _opposite(given[0])
        return given[0] if given[1] else _ANY
    if step.op in ("add", "sub"):
        return given[0] & given[1]
    if step.op in ("maximum", "clamp_min"):
        return (given[0] | given[1]) & _NOT_NEGATIVE
    if step.op in ("minimum", "clamp_max"):
        return (given[0] | given[1]) & _NOT_POSITIVE
    return _ANY
