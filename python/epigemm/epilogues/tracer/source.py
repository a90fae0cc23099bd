"""A program -> C++: the functor.

Of the user's code the text has only numbers: operands are named by their slots, results `v0`, `v1` and so on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from epigemm.epilogues.kinds import SLOTS, slots_of
from epigemm.epilogues.tracer.program import BFLOAT16, BOOL, FLOAT, HALF, Program, Ref, Step, Value, words

OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "logical_and": "&&",
    "logical_or": "||",
    "logical_xor": "!=",
}
NAMES = {"reciprocal": "inverse", "floor_divide": "floor_div"}
NEAR = frozenset(words("sin cos tan sinc fmod remainder floor_div floor_divide"))
"""The functions that have a near form (short_angles.h and short_quotients.h in csrc/epilogue/primitives)."""


def number_text(value: float) -> str:
    """A number of type T, exactly."""
    if math.isnan(value):
        return "T(epigemm::math::not_a_number())"
    if math.isinf(value):
        return f"T({'-' if value < 0 else ''}epigemm::math::infinity())"
    return f"T({value!r})" if value == round(value, 6) and abs(value) < 1e15 else f"T({value.hex()})"


def _expression(program: Program, step: Step, names: Sequence[str]) -> str:
    def text(value: Value) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return names[value.number] if isinstance(value, Ref) else number_text(value)

    inputs = [text(value) for value in step.inputs]
    if step.op in OPERATORS:
        written = f"{inputs[0]} {OPERATORS[step.op]} {inputs[1]}"
    elif step.op == "logical_not":
        written = f"!{inputs[0]}"
    elif step.op == "neg":
        written = f"-{inputs[0]}"
    elif step.op == "copy":
        written = inputs[0]
    elif step.op == "pow" and isinstance(step.inputs[1], float) and step.inputs[1] in POWERS:
        written = POWERS[step.inputs[1]].replace("x", inputs[0])
    else:
        given = [*inputs, "is_far..."] if step.op in NEAR else inputs
        written = f"epigemm::math::{NAMES.get(step.op, step.op)}({', '.join(given)})"
    return f"epigemm::math::to_{step.kind}({written})" if step.kind in (HALF, BFLOAT16, FLOAT) else written


# torch computes these powers in the same way.
POWERS = {
    0.5: "epigemm::math::sqrt(x)",
    2.0: "x * x",
    3.0: "x * x * x",
    -0.5: "epigemm::math::rsqrt(x)",
    -1.0: "epigemm::math::inverse(x)",
}


def has_near_form(program: Program) -> bool:
    """Whether a step is in `NEAR`."""
    return any(step.op in NEAR for step in program.steps)


def functor_text(program: Program, kinds: Sequence[str], name: str = "Functor") -> str:
    """The functor: `Functor::apply(acc, operands...)`, operands in the function's order.

    A functor that calls a function with a near form has one, too, with a `bool&` as the last argument.
    """
    arguments = ["acc", *(SLOTS[slot] for slot in slots_of(kinds))]
    names = [*arguments, *(f"v{number}" for number in range(len(program.steps)))]
    lines = []
    for number, step in enumerate(program.steps):
        kind = "bool" if step.kind == BOOL else "T"
        lines.append(f"    const {kind} v{number} = {_expression(program, step, names)};")
    result = program.result
    returned = names[result.number] if isinstance(result, Ref) else number_text(float(result))
    given = ", ".join(f"[[maybe_unused]] T {argument}" for argument in arguments)
    given += ", Far&... is_far" if has_near_form(program) else ""
    return "\n".join(
        [
            f"struct {name} {{",
            f"  template <class T{', class... Far' if has_near_form(program) else ''}>",
            f"  EPIGEMM_HOST_DEVICE static T apply({given}) {{",
            *lines,
            f"    return {returned};",
            "  }",
            "};",
            "",
        ]
    )


def describe_compile_error(program: Program, source: str, log: str) -> str:
    """The first error of NVRTC's log, with the line of the user's code that it comes from."""
    lines = ["", *source.split("\n")]
    for found in re.finditer(r"\((\d+)\): (?:catastrophic )?error:? (.*)", log):
        line = "".join(lines[int(found[1]) : int(found[1]) + 1])
        step = re.match(r"\s*const (?:T|bool) v(\d+) = ", line)
        is_of_user = step is not None and int(step[1]) < len(program.steps)
        return f"{program.steps[int(step[1])].line}: {found[2]}" if step and is_of_user else found[2]
    return log.strip().split("\n")[0]


def header_folder() -> Path:
    """Where the headers are: in an installed package, in `csrc` in a source tree.

    Raises:
        FileNotFoundError: in neither place.
    """
    here = Path(__file__).parents[2]
    for folder in (here / "include", here.parents[1] / "csrc"):
        if (folder / "epilogue" / "primitives.h").is_file():
            return folder
    raise FileNotFoundError(f"epigemm's headers are missing: {here / 'include'}")


@functools.cache
def prelude(*headers: str) -> str:
    """Headers as one text without includes under NVRTC, behind those that functors call."""
    folder = header_folder()
    seen: set[str] = set()

    def expanded(name: str) -> list[str]:
        if name in seen:
            return []
        seen.add(name)
        lines: list[str] = []
        for line in (folder / name).read_text().splitlines():
            found = re.match(r'#include "([\w/]+\.h)"', line)
            if found:
                lines += expanded(found[1])
            elif line.strip() != "#pragma once" and not line.lstrip().startswith("//"):
                lines.append(line.split("  // ")[0])
        return lines

    every = [line for name in ("epilogue/primitives.h", *headers) for line in expanded(name)]
    return "\n".join(line for line in every if line) + "\n"


def named_functor(name: str) -> str:
    """The functor that is a struct of csrc/epilogue, in place of `functor_text`."""
    return f"using Functor = epigemm::{name};\n"
