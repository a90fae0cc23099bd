"""The reasons in Python are those of csrc/call."""

from __future__ import annotations

import re
from pathlib import Path

from epigemm.calls import resolve
from epigemm.planner.reasons import Reason

HEADER = Path(__file__).parents[2] / "csrc" / "call" / "torch.h"


def in_capitals(name: str) -> str:
    """`LacksPack` as Python writes it."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def test_names_and_numbers_are_those_of_the_enumeration() -> None:
    body = re.search(r"enum class Answer \{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    names = re.findall(r"^\s*(\w+),", body[1], re.MULTILINE)
    assert names[:2] == ["Done", "Raised"]
    assert {in_capitals(name): number for number, name in enumerate(names) if number > 1} == {
        reason.name: reason.value for reason in Reason
    }


def test_something_is_done_about_each_reason() -> None:
    """But for what is autograd's, which the table's calls are done with."""
    assert set(Reason) - set(resolve._REMEDIES) == {Reason.RECORDED, Reason.RECORDED_BY_TORCH, Reason.NO_PAIR}
