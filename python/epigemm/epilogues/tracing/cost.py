"""How long a functor is, as the planner is told it: by the special functions that it computes for an element.

A unit is one special-function instruction (an exponential, a logarithm or a reciprocal of the hardware's), or eight
ordinary ones, which take a multiprocessor as long. Counted in the machine code of fp32 functors, without the branches
that ordinary arguments do not take.
"""

from __future__ import annotations

from collections.abc import Sequence

from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.tracing.program import Program, Ref, Step
from epigemm.epilogues.tracing.source import POWERS

TRANSCENDENTAL = {
    **dict.fromkeys(["exp", "exp2"], 1),
    **dict.fromkeys(["sigmoid", "tanh", "gelu_tanh", "atan"], 2),
    **dict.fromkeys(["expm1", "log", "log2", "log10", "log1p", "erf", "erfinv"], 3),
    **dict.fromkeys(["sin", "cos", "asin", "acos", "sinh", "cosh"], 3),
    **dict.fromkeys(["elu", "softplus", "gelu", "xlogy", "tan", "hypot"], 4),
    **dict.fromkeys(["erfc", "asinh", "acosh", "atanh", "atan2", "logaddexp", "logaddexp2"], 5),
    **dict.fromkeys(["i0", "sinc"], 8),
    "pow": 10,
    **dict.fromkeys(["lgamma", "digamma"], 20),
}
"""Exponentials, logarithms and the like, each with its units."""

_QUOTIENTS = {
    **dict.fromkeys(["div", "reciprocal", "sqrt", "rsqrt"], 1),
    **dict.fromkeys(["fmod", "remainder", "floor_div", "trunc_div"], 8),
}
_UNITS = TRANSCENDENTAL | _QUOTIENTS
_POWERS = dict.fromkeys(POWERS, 0) | dict.fromkeys([0.5, -0.5, -1.0], 1)


def special_functions(program: Program, kinds: Sequence[str]) -> int:
    """The units of a program for one element of the result.

    What is computed of scalars and constants alone is computed once, and so is the reciprocal of such a divisor.
    """
    once = {number for number, kind in enumerate(kinds, 1) if kind == SCALAR}
    units = 0
    for number, step in enumerate(program.steps, program.operands + 1):
        of_element = [isinstance(value, Ref) and value.number not in once for value in step.inputs]
        if not any(of_element):
            once.add(number)
        elif step.op != "div" or of_element[1]:
            units += _units(step)
    return units


def _units(step: Step) -> int:
    if step.op == "pow" and isinstance(step.inputs[1], float) and step.inputs[1] in _POWERS:
        return _POWERS[step.inputs[1]]
    return _UNITS.get(step.op, 0)
