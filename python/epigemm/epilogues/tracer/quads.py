"""The functions of csrc/open/contract.h that apply a functor to four elements of D: of two rows and two columns."""

from __future__ import annotations

from collections.abc import Sequence

from epigemm.epilogues.kinds import SLOTS

_ELEMENTS = range(4)  # 2 r + c of row r and column c
_MASKS = {"c": 1, "r": 2, "s": 0, "m": 3}
"""By the first letter of a slot's name: the bits of an element's number by which its value differs from others'."""


def functions(slots: Sequence[int], number: str | None, *, is_long: bool, near: bool) -> str:
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
