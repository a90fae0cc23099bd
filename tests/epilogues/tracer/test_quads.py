"""The functor of four elements: what a short and a long functor's text says, compiled for the CPU."""

from __future__ import annotations

import re

import pytest
import torch

import epigemm
from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import SLOTS
from epigemm.epilogues.tracer import cost


def short(acc: torch.Tensor, bias: epigemm.PerColumn) -> torch.Tensor:
    return torch.relu(acc + bias)


def long(
    acc: torch.Tensor,
    bias: epigemm.PerColumn,
    row: epigemm.PerRow,
    factor: epigemm.Scalar,
    other: epigemm.Matrix,
) -> torch.Tensor:
    z = torch.sinh(torch.asin(torch.clamp(acc + bias * row, -1, 1)))
    return z * torch.log(torch.abs(other) + 1) + torch.sqrt(torch.abs(factor * z))


def long_and_far(acc: torch.Tensor, row: epigemm.PerRow) -> torch.Tensor:
    return torch.sin(acc) * torch.erfc(acc * row) + torch.sinh(torch.erfc(acc))


def traced(function: object) -> Traced:
    found = trace(function)  # type: ignore[call-overload]
    assert isinstance(found, Traced)
    return found


def text_of(function: object, part: str) -> str:
    of = traced(function)
    text = of.kernel_source([1] * len(of.operands), ("operand", part))
    return text[text.index("struct Functor") :]


@pytest.mark.parametrize("part", ["apply", "apply_float16", "apply_bfloat16"])
def test_a_long_functor_is_not_inlined(part: str) -> None:
    assert "__noinline__" not in text_of(short, part)
    assert text_of(long, part).count("__noinline__") == 1
    # A near form is a second one.
    assert text_of(long_and_far, part).count("__noinline__") == (1 if part == "apply" else 2)


def test_what_is_long() -> None:
    """By the instructions of the arithmetic that runs: a result of 16 bits has shorter functions."""
    mish = traced(lambda acc: torch.nn.functional.mish(acc))
    assert cost.is_long(mish.program, mish.kinds, "apply")
    assert not cost.is_long(mish.program, mish.kinds, "apply_bfloat16")


@pytest.mark.parametrize("function", [short, long, long_and_far])
def test_each_element_gets_its_own_values(function: object) -> None:
    """Every parameter of the function that is not inlined is given the value that its name says."""
    text = text_of(function, "apply")
    declared = re.search(r"of_Four\(float ([^)]*)\) \{", text)
    if declared is None:
        assert function is short
        return
    given = re.search(r"found = of_Four\((.*)\);", text)
    assert given is not None
    names = declared[1].split(", float ")
    places = given[1].split(", ")
    assert len(names) == len(places)
    for name, place in zip(names, places, strict=True):
        slot, _, element = name.rpartition("_")
        if slot == "acc":
            assert place == f"accs[{element}]"
        else:
            assert place == f"values[{int(element) * len(SLOTS) + SLOTS.index(slot)}]"
    for i in range(4):
        call = re.search(rf"found\.of\[{i}\] = Functor::apply\(([^)]*)\)", text)
        assert call is not None
        for value in call[1].split(", "):
            slot, _, element = value.rpartition("_")
            same_row, same_column = int(element) // 2 == i // 2, int(element) % 2 == i % 2
            assert {"a": same_row and same_column, "m": same_row and same_column}.get(slot[0], True)
            assert same_column if slot[0] == "c" else same_row if slot[0] == "r" else True
