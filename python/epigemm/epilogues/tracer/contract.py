"""The functions of csrc/open/contract.h, which open kernels leave undefined, by a functor's text (`source`)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from epigemm.epilogues.kinds import SLOTS, slots_of
from epigemm.epilogues.tracer import source
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.epilogues.tracer.program import Program

_ELEMENTS = range(4)  # 2 r + c of row r and column c
_MASKS = {"c": 1, "r": 2, "s": 0, "m": 3}
"""By the first letter of a slot's name: the bits of an element's number by which its value differs from others'."""
STORED = "StoredFunctor"
"""The name of the second value's functor."""
_VALUES = ("acc", *SLOTS)


def kernel_functions(
    program: Program,
    kinds: Sequence[str],
    elements: Sequence[int],  # for each operand 1 for x's element type, 2 for float; for scalars 2
    # which: operand, slope, slope_double, apply, apply_double, or apply_float16 and apply_bfloat16: `apply` for a
    # result that is rounded to 16 bits, with shorter instructions where `short_number` says so
    parts: Sequence[str] = ("operand", "apply"),
    long_parts: Container[str] = (),  # those for which the functor is long (`cost.is_long`)
    beside: Program | None = None,  # of the second value (`stored`)
    shared: Sequence[int] = (),  # the slots of matrices that share rows; they go with "operand"
) -> str:
    """The functions that open kernels leave undefined, by `Functor`."""
    slots = slots_of(kinds)
    read = program.reads() | (frozenset() if beside is None else beside.reads())
    text = []
    if "operand" in parts:
        table = "".join(
            f"  if (slot == {slot}) return {element};\n"
            for number, (slot, element) in enumerate(zip(slots, elements, strict=True), 1)
            if number in read
        )
        text.append(f'extern "C" __device__ int epigemm_operand(int slot) {{\n{table}  return 0;\n}}\n')
        any_of = " || ".join(f"slot == {slot}" for slot in shared) or "false"
        text.append(f'extern "C" __device__ bool epigemm_shares_rows(int slot) {{\n  return {any_of};\n}}\n')
    for part in parts:
        if part != "operand":
            form = ROUNDED_TO.get(part.removeprefix("apply_"))
            short = short_number(program, form) if form else None
            text.append(_function(part, slots, short))
            near = short if form and source.has_near_form(program) else None
            if form:
                text.append(_near_functions(slots, near))
            if form or part == "apply":
                is_long = part in long_parts
                text.append(of_four(slots, short, is_long=is_long, near=False))
                second = short_number(beside, form) if beside is not None and form else None
                has_far = beside is not None and source.has_near_form(beside)
                text.append(second_value(beside is not None, slots, second, form is not None, has_far))
            if form:
                apart = of_four(slots, near, is_long=is_long, near=True) if near else same_as_near()
                text.append(apart)
    return "\n".join(text)


def _near_functions(slots: Sequence[int], short: str | None) -> str:
    """`epigemm_apply_near` and `epigemm_has_far`. `short`: the type of the near form, None if there is none."""
    parameters = ", ".join(f"float {value}" for value in ("acc", *SLOTS))
    if short:
        used = ["acc", *(SLOTS[slot] for slot in slots)]
        call = f"Functor::apply({', '.join(f'epigemm::{short}({value})' for value in used)}, is_far).value"
    else:
        call = f"epigemm_apply({', '.join(('acc', *SLOTS))})"
    near = f'extern "C" __device__ float epigemm_apply_near({parameters}, bool& is_far)'
    has_far = f"return {'true' if short else 'false'};"
    return (
        f'{near} {{\n  return {call};\n}}\nextern "C" __device__ bool epigemm_has_far() {{\n  {has_far}\n}}\n'
    )


def _function(part: str, slots: Sequence[int], short: str | None) -> str:
    number = "double" if part.endswith("_double") else "float"
    values = ["acc", *SLOTS]
    used = ["acc", *(SLOTS[slot] for slot in slots)]
    parameters = ", ".join(f"{number} {value}" for value in values)
    if part.startswith("slope"):
        dual = f"epigemm::Dual<{number}>"
        given = ", ".join(
            f"{dual}({value}, {number}(slot == {slot}), slot != {slot})"
            for value, slot in zip(used, [-1, *slots], strict=True)
        )
        body = f"  const {dual} result = Functor::apply({given});\n"
        body += f"  return result.constant ? {number}(0) : result.derivative;\n"
        name = "epigemm_slope" + ("_double" if number == "double" else "")
        return f'extern "C" __device__ {number} {name}({parameters}, int slot) {{\n{body}}}\n'
    if short:
        call = f"Functor::apply({', '.join(f'epigemm::{short}({value})' for value in used)}).value"
    else:
        call = f"Functor::apply({', '.join(used)})"
    name = "epigemm_apply" + ("_double" if number == "double" else "")
    return f'extern "C" __device__ {number} {name}({parameters}) {{\n  return {call};\n}}\n'


# --- four elements of D: of two rows and two columns -----------------------------------------------------------------


def of_four(slots: Sequence[int], number: str | None, *, is_long: bool, near: bool) -> str:
    """`epigemm_apply_four`, or the near form `epigemm_apply_near_four`.

    `slots`: of the functor's operands. `number`: the type that it computes in; None: float. `is_long`: whether it is
    computed in a function of its own, which is not inlined.
    """
    name = f"epigemm_apply{'_near' if near else ''}"
    head = f'extern "C" __device__ void {name}_four(const float* accs, const float* values, float* results'
    head += ", bool& is_far) {\n" if near else ") {\n"
    if is_long:
        return _apart(slots, number, near) + head + _call_apart(slots, near) + "}\n"
    values = ", ".join(f"v[{slot}]" for slot in range(len(SLOTS)))
    lines = [
        "#pragma unroll",
        "  for (int i = 0; i < 4; ++i) {",
        f"    const float* const v = values + i * {len(SLOTS)};",
        f"    results[i] = {name}(accs[i], {values}{', is_far' if near else ''});",
        "  }",
    ]
    return head + "\n".join(lines) + "\n}\n"


def same_as_near() -> str:
    """`epigemm_apply_near_four` of a functor without a near form."""
    return (
        'extern "C" __device__ void epigemm_apply_near_four(const float* accs, const float* values, float* results, '
        "bool&) {\n  epigemm_apply_four(accs, values, results);\n}\n"
    )


def _distinct(slot: int) -> list[int]:
    """The elements whose values of a slot are passed. The others have the same ones."""
    mask = _MASKS[SLOTS[slot][0]]
    return [element for element in _ELEMENTS if element & mask == element]


def _given(slot: int, element: int) -> str:
    """The parameter with an element's value of a slot."""
    return f"{SLOTS[slot]}_{element & _MASKS[SLOTS[slot][0]]}"


def _apart(slots: Sequence[int], number: str | None, near: bool) -> str:
    """The function that is not inlined, and the type of its result."""
    parameters = [f"float acc_{i}" for i in _ELEMENTS]
    parameters += [f"float {SLOTS[slot]}_{i}" for slot in slots for i in _distinct(slot)]
    kind = "NearFour" if near else "Four"
    lines = [f"struct {kind} {{\n  float of[4];"]
    lines += ["  bool is_far;"] if near else []
    lines += [
        "};",
        f"static __device__ __noinline__ {kind} of_{kind}({', '.join(parameters)}) {{",
        f"  {kind} found;",
    ]
    lines += ["  found.is_far = false;"] if near else []
    for i in _ELEMENTS:
        given = [f"acc_{i}", *(_given(slot, i) for slot in slots)]
        numbers = ", ".join(f"epigemm::{number}({value})" if number else value for value in given)
        call = f"Functor::apply({numbers}{', found.is_far' if near else ''}){'.value' if number else ''}"
        lines.append(f"  found.of[{i}] = {call};")
    return "\n".join([*lines, "  return found;", "}\n"])


def _call_apart(slots: Sequence[int], near: bool) -> str:
    given = [f"accs[{i}]" for i in _ELEMENTS]
    given += [f"values[{i * len(SLOTS) + slot}]" for slot in slots for i in _distinct(slot)]
    kind = "NearFour" if near else "Four"
    far = "  if (found.is_far) is_far = true;\n" if near else ""
    return (
        f"  const {kind} found = of_{kind}({', '.join(given)});\n"
        f"#pragma unroll\n  for (int i = 0; i < 4; ++i) results[i] = found.of[i];\n{far}"
    )


# --- a second value of each element, which a kernel stores beside the result ------------------------------------------


def second_value(
    is_there: bool, slots: Sequence[int], number: str | None, is_of_16_bits: bool, has_far: bool
) -> str:
    """Whether there is a second value; the value, by `STORED`; and for kernels of 16 bits its near form.

    `slots`: of the functor's operands. `number`: the type that it computes in; None: float. `has_far`: whether it calls
    functions with a near form. It has a near form itself if these are the short ones.
    """
    value = _call(slots, number) if is_there else "0.0f"
    text = [_answer("epigemm_has_store", is_there), _value("epigemm_store", value)]
    if is_of_16_bits:
        is_near = has_far and number is not None
        near = _call(slots, number, ", is_far") if is_near else f"epigemm_store({', '.join(_VALUES)})"
        text.append(_value("epigemm_store_near", near, ", bool& is_far"))
        text.append(_answer("epigemm_has_far_store", is_near))
    return "".join(text)


def _answer(name: str, is_so: bool) -> str:
    return f'extern "C" __device__ bool {name}() {{\n  return {str(is_so).lower()};\n}}\n'


def _value(name: str, value: str, more: str = "") -> str:
    parameters = ", ".join(f"float {each}" for each in _VALUES)
    return f'extern "C" __device__ float {name}({parameters}{more}) {{\n  return {value};\n}}\n'


def _call(slots: Sequence[int], number: str | None, more: str = "") -> str:
    used = ["acc", *(SLOTS[slot] for slot in slots)]
    numbers = ", ".join(f"epigemm::{number}({each})" if number else each for each in used)
    return f"{STORED}::apply({numbers}{more}){'.value' if number else ''}"
