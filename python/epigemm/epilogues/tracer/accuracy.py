"""Which short functions a functor with a 16-bit result may use.

Their relative errors are given in units of 2^-24, fp32's last place. Rounding to fp16 has an error of up to 2^-11, and
to bf16 of up to 2^-8. Products, quotients and choices do not enlarge a relative error. A sum whose terms cancel, such
as z - tanh(z), does, and so may other functions. So the errors of a program are estimated step by step. More accurate
functions are used, for all steps, in three cases: if an error of more than `FEW` units reaches a step that may enlarge
it, if the errors of factors add up to more than `most`, or if a whole number is made of an inexact value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epigemm.epilogues.tracer.program import Program, Ref, Step, Value, words

FEW = 64  # a few steps in fp32 may lose as much
UNITS = {
    # One instruction, or an exponential made of one; that of exp for results in fp16's range.
    **dict.fromkeys(words("div reciprocal sqrt rsqrt exp2"), 2),
    **dict.fromkeys(words("exp sigmoid"), 16),
    # csrc/epilogue/primitives/short_angles.h: up to 2^-19 from angles of at most 1e5, atan2 2^-18.
    **dict.fromkeys(words("sin cos tan"), 32),
    "sinc": 36,
    # csrc/epilogue/primitives/short.h: up to 2^-18 (pow: for results in fp16's range); then up to 2^-17, and log1p
    # 2^-16.
    "hypot": 8,
    **dict.fromkeys(words("atan2 asinh acosh atanh pow"), 64),
    **dict.fromkeys(words("tanh expm1 elu gelu gelu_tanh"), 128),
    **dict.fromkeys(words("log1p softplus logaddexp logaddexp2"), 256),
}
"""The errors of the functions of `Rounded`, in units. All others are those of float."""
UNITS_OF_BFLOAT16 = {
    **UNITS,
    # csrc/epilogue/primitives/short_bfloat16.h: up to 2^-10.98, 2^-11.39 and 2^-11.3.
    "tanh": 8300,
    "gelu": 6400,
    **dict.fromkeys(words("expm1 elu log1p softplus logaddexp logaddexp2"), 6700),
}
"""The errors of the functions of `RoundedToBFloat16`."""
KEEPING = frozenset(
    words(
        "mul div neg abs reciprocal sqrt rsqrt tanh relu leaky_relu maximum minimum fmin fmax clamp clamp_min "
        "clamp_max hardtanh copysign copy detach where isnan logical_not logical_and logical_or logical_xor"
    )
)
"""Functions that do not enlarge the relative errors of their inputs. Those of factors add up."""
POWERS = {
    0.5: ("epigemm::math::sqrt(x)", ["sqrt"]),
    2.0: ("x * x", ["mul"]),
    3.0: ("x * x * x", ["mul", "mul"]),
    -0.5: ("epigemm::math::rsqrt(x)", ["rsqrt"]),
    -1.0: ("epigemm::math::inverse(x)", ["reciprocal"]),
}
"""Powers that are computed as products, roots and quotients, as by torch: their text, and their primitives. To the
error of these comes the base's error times the exponent."""
STEPS = frozenset(
    words(
        "trunc floor ceil round floor_div floor_divide trunc_div fmod remainder sign heaviside "
        "eq ne lt le gt ge isinf isfinite signbit"
    )
)
"""Functions that may turn an error in the last bit into a whole number."""
NEVER = frozenset(words("trunc_div"))
"""Functions that round an inexact quotient to a whole number."""

_ANY, _NOT_NEGATIVE, _NOT_POSITIVE = 0, 1, 2  # bits: what is known of a sign; a 0 has both
_POSITIVE = frozenset(words("exp exp2 sigmoid abs sqrt rsqrt relu softplus cosh erfc"))
_SIGN_KEEPING = frozenset(words("tanh expm1 log1p gelu gelu_tanh erf atan asinh sinh copy detach"))


@dataclass(frozen=True)
class RoundedTo:
    """A type that results are rounded to."""

    most: int  # the error that a result may have, in units: a quarter of the rounding's
    # the types of csrc/epilogue/rounded.h, shortest first, and their units
    numbers: Mapping[str, Mapping[str, int]]


ROUNDED_TO = {
    "float16": RoundedTo(2048, {"Rounded": UNITS}),
    "bfloat16": RoundedTo(16384, {"RoundedToBFloat16": UNITS_OF_BFLOAT16, "Rounded": UNITS}),
}


def short_number(program: Program, rounded_to: RoundedTo) -> str | None:
    """The type with the shortest functions whose error stays below `most` units; None for float."""
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
            error = max(units.get(op, 0) for op in POWERS[exponent][1]) + abs(exponent) * given[0]
        if error > most:
            return False
        errors[Ref(number)], signs[Ref(number)] = error, _sign(step, terms)
    return True


def _of_number(value: float) -> int:
    return (_NOT_NEGATIVE if value >= 0 else _ANY) | (_NOT_POSITIVE if value <= 0 else _ANY)


def _opposite(sign: int) -> int:
    return {_NOT_NEGATIVE: _NOT_POSITIVE, _NOT_POSITIVE: _NOT_NEGATIVE}.get(sign, sign)


def _sign(step: Step, given: Sequence[int]) -> int:
    """The sign of a step's result, as far as known, from those of its inputs (of what is subtracted, the opposite)."""
    if step.op in _POSITIVE or (step.op == "mul" and step.inputs[0] == step.inputs[1]):
        return _NOT_NEGATIVE
    if step.op in _SIGN_KEEPING:
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
