"""The kinds of operands: the package and the kernels describe the same."""

import re
from pathlib import Path

from epigemm.epilogues.kinds import KINDS, SLOTS, slots_of

CSRC = Path(__file__).parents[2] / "csrc"


def test_the_traits_are_those_of_the_kernels() -> None:
    text = (CSRC / "epilogue/operands.h").read_text()
    rows = re.findall(r'\{"(\w+)", (true|false), (true|false), (\d+)\}', text)
    found = [(name, row == "true", column == "true", int(most)) for name, row, column, most in rows]
    assert [name for name, *_ in found] == ["accumulator", *KINDS]
    assert found[1:] == [(name, kind.by_row, kind.by_column, kind.most) for name, kind in KINDS.items()]
    assert [kind.code for kind in KINDS.values()] == list(range(1, len(KINDS) + 1))


def test_the_slots_are_those_of_the_kernels() -> None:
    values = re.search(r"#define EPIGEMM_SLOTS\(T\) (.*)", (CSRC / "open/contract.h").read_text())
    assert values and tuple(values[1].removeprefix("T ").split(", T ")) == SLOTS


def test_operands_take_the_slots_of_their_kind_in_order() -> None:
    assert slots_of(("matrix", "per_column", "scalar", "per_column", "per_row")) == (10, 0, 4, 1, 8)
