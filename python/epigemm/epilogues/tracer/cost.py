"""The primitives of a functor, for the planner. csrc/epilogue/costs.def has the cost of each primitive.

`python -m tools.fit_costs` measures them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.epilogues.tracer.program import BFLOAT16, HALF, Program, Ref, Step
from epigemm.epilogues.tracer.source import POWERS, header_folder

_POWERS = {0.5: ["sqrt"], 2.0: ["mul"], 3.0: ["mul", "mul"], -0.5: ["rsqrt"], -1.0: ["reciprocal"]}
_LONG = (0.15, 0.33)
"""Cycles of a multiprocessor for an element, in the elementwise kernel, from which on a functor is long: with float's
functions, and with the short ones. Of seventeen functors behind K = 256 on an H100, the long ones took .26 to 1.02 of
their kernel's time with everything inlined in fp32, and .36 to 1.09 in 16 bits. A sigmoid in fp32 is long."""
assert _POWERS.keys() == POWERS.keys()


def primitives(program: Program, kinds: Sequence[str]) -> str:
    """The primitives that a program computes for an element of the result: their names, between commas.

    Two kinds of steps are left out: those of scalars and constants alone, which run once, and the bias, which every
    kernel adds.
    """
    once = {number for number, kind in enumerate(kinds, 1) if kind == SCALAR}
    names: list[str] = []
    bias = program.bias()
    for number, step in enumerate(program.steps, program.operands + 1):
        of_element = [isinstance(value, Ref) and value.number not in once for value in step.inputs]
        if not any(of_element):
            once.add(number)
        elif not (step.op == "add" and bias is not None and set(step.inputs) == {Ref(0), Ref(bias)}):
            names += _names(step, is_divisor_scalar=step.op == "div" and not of_element[1])
    return ",".join(names)


def is_long(program: Program, kinds: Sequence[str], part: str) -> bool:
    """Whether the functor is too long to be inlined into each of a thread's sums (csrc/open/contract.h).

    `part`: the function, as `contract.kernel_functions` names it.
    """
    form = ROUNDED_TO.get(part.removeprefix("apply_"))
    column = int(form is not None and short_number(program, form) is not None)
    table = _cycles()
    names = filter(None, primitives(program, kinds).split(","))
    return sum(table.get(name, table["other"])[column] for name in names) >= _LONG[column]


@functools.cache
def _cycles() -> dict[str, tuple[float, float]]:
    """What each primitive takes in the elementwise kernel: with float, and with the short functions."""
    text = (header_folder() / "epilogue" / "costs.def").read_text()
    rows = re.findall(r"EPIGEMM_COST\((\w+), ([\d.e-]+), ([\d.e-]+),", text)
    return {name: (float(of_float), float(short)) for name, of_float, short in rows}


def _names(step: Step, *, is_divisor_scalar: bool) -> Iterator[str]:
    exponent = step.inputs[1] if step.op == "pow" else None
    if isinstance(exponent, float) and exponent in _POWERS:
        yield from _POWERS[exponent]
    else:
        name = "floor_div" if step.op == "floor_divide" else step.op
        yield "div_by_scalar" if is_divisor_scalar else name
    if step.kind in (HALF, BFLOAT16):
        yield f"to_{step.kind}"
