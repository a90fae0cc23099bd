"""A program -> C++: the functor, and the functions that open kernels leave undefined (csrc/open/functor.h).

Of the user's code the text has only numbers: operands are named by their slots, results `v0`, `v1` and so on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from epigemm.epilogues.kinds import KINDS, SCALAR, SLOTS, slots_of
from epigemm.epilogues.tracer.accuracy import POWERS, ROUNDED_TO, RoundedTo, short_number
from epigemm.epilogues.tracer.program import BFLOAT16, BOOL, FLOAT, HALF, Program, Ref, Step, Value, words

WRITTEN = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_not": "!{0}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_xor": "{0} != {1}",
    "copy": "{0}",
}
"""Primitives that are operators of C++; the others are functions."""
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


def _expression(step: Step, names: Sequence[str]) -> str:
    def text(value: Value) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return names[value.number] if isinstance(value, Ref) else number_text(value)

    inputs = [text(value) for value in step.inputs]
    if step.op in WRITTEN:
        written = WRITTEN[step.op].format(*inputs)
    elif step.op == "pow" and isinstance(step.inputs[1], float) and step.inputs[1] in POWERS:
        written = POWERS[step.inputs[1]][0].replace("x", inputs[0])
    else:
        given = [*inputs, "is_far..."] if step.op in NEAR else inputs
        written = f"epigemm::math::{NAMES.get(step.op, step.op)}({', '.join(given)})"
    return f"epigemm::math::to_{step.kind}({written})" if step.kind in (HALF, BFLOAT16, FLOAT) else written


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
        lines.append(f"    const {kind} v{number} = {_expression(step, names)};")
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


STORED = "StoredFunctor"
"""The name of the second value's functor."""


def kernel_functions(
    program: Program,
    kinds: Sequence[str],
    elements: Sequence[int],  # for each operand 1 for x's element type, 2 for float; for scalars 2
    # which: operand, slope, slope_double, apply, apply_double, or apply_float16 and apply_bfloat16: `apply` for a
    # result that is rounded to 16 bits, with shorter instructions where `short_number` says so
    parts: Sequence[str] = ("operand", "apply"),
    beside: Program | None = None,  # of the second value (`stored`)
    shared: Sequence[int] = (),  # the slots of matrices that share rows; they go with "operand"
) -> str:
    """The functions that open kernels leave undefined, by `Functor`."""
    slots = slots_of(kinds)
    lines = []
    for part in parts:
        number, of = "double" if part.endswith("_double") else "float", f"of_{part}"
        form = ROUNDED_TO.get(part.removeprefix("apply_"))
        if part != "operand":
            lines.append(f"using {of} = {_applied('Functor', program, slots, form, number)};")
        if part == "operand":
            read = program.reads() | (frozenset() if beside is None else beside.reads())
            table = [
                f"  if (slot == {slot}) return {element};"
                for number, (slot, element) in enumerate(zip(slots, elements, strict=True), 1)
                if number in read
            ]
            lines += ['extern "C" __device__ int epigemm_operand(int slot) {', *table, "  return 0;", "}"]
            shares = " || ".join(f"slot == {slot}" for slot in shared) or "false"
            lines.append(
                f'extern "C" __device__ bool epigemm_shares_rows(int slot) {{\n  return {shares};\n}}'
            )
        elif part.startswith("slope"):
            lines.append(f"EPIGEMM_DEFINE_SLOPE({number}, epigemm_{part}, {of})")
        elif number == "double":
            lines.append(f"EPIGEMM_DEFINE_DOUBLE({of})")
        else:
            given = [of, str(is_long(program, kinds, part)).lower(), *map(str, _places(kinds, slots))]
            lines.append(f"using four = epigemm::open::Four<{', '.join(given)}>;")
            stored = "epigemm::open::Nothing" if beside is None else _applied(STORED, beside, slots, form)
            lines.append(f"using stored = {stored};")
            lines.append(f"EPIGEMM_DEFINE_APPLY({of}, four, stored)")
            if form:
                lines.append(f"EPIGEMM_DEFINE_NEAR({of}, four, stored)")
    return "\n".join([*lines, ""])


def _applied(
    functor: str, program: Program, slots: Sequence[int], form: RoundedTo | None, number: str = "float"
) -> str:
    """A functor with its slots and the type that it computes in."""
    short = short_number(program, form) if form else None
    is_near = str(short is not None and has_near_form(program)).lower()
    arguments = [functor, f"epigemm::{short}" if short else number, is_near, *map(str, slots)]
    return f"epigemm::open::Applied<{', '.join(arguments)}>"


def _places(kinds: Sequence[str], slots: Sequence[int]) -> list[int]:
    """Where the values of four elements lie that a functor reads: of two rows and two columns, each value once."""
    bits = [KINDS[kind].by_column + 2 * KINDS[kind].by_row for kind in kinds]
    elements = [[each for each in range(4) if each & mask == each] for mask in bits]
    return [each * len(SLOTS) + slot for slot, of in zip(slots, elements, strict=True) for each in of]


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


# --- the primitives of a functor, for the planner: csrc/epilogue/costs.def has the cost of each ----------------------


_LONG = (0.15, 0.33)
"""Cycles of a multiprocessor for an element, in the elementwise kernel, from which on a functor is long: with float's
functions, and with the short ones. Of seventeen functors behind K = 256 on an H100, the long ones took .26 to 1.02 of
their kernel's time with everything inlined in fp32, and .36 to 1.09 in 16 bits. A sigmoid in fp32 is long."""


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

    `part`: the function, as `kernel_functions` names it.
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
    if isinstance(exponent, float) and exponent in POWERS:
        yield from POWERS[exponent][1]
    else:
        name = "floor_div" if step.op == "floor_divide" else step.op
        yield "div_by_scalar" if is_divisor_scalar else name
    if step.kind in (HALF, BFLOAT16):
        yield f"to_{step.kind}"
