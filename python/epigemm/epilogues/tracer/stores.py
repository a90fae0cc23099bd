"""The functions of csrc/open/contract.h for a second value of each element, which a kernel stores beside the result."""

from __future__ import annotations

from collections.abc import Sequence

from epigemm.epilogues.kinds import SLOTS

STORED = "StoredFunctor"
"""The name of the second value's functor."""
_VALUES = ("acc", *SLOTS)


def functions(
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
