"""Programs written by hand: which operand is a bias. Where a gradient ends: tests/autograd."""

from __future__ import annotations

import pytest

from epigemm.epilogues.tracer.program import HALF, REAL, Program, Ref, Step, Value

ACC, A, B = Ref(0), Ref(1), Ref(2)


def program(
    result: Value, *steps: tuple[str, tuple[Value, ...]] | tuple[str, tuple[Value, ...], str]
) -> Program:
    """Of two operands."""
    made = [Step(each[0], each[1], each[2] if len(each) > 2 else REAL, "file.py:1") for each in steps]
    return Program(2, tuple(made), result)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((("add", (ACC, B)), ("relu", (Ref(3),))), 2),
        ((("add", (A, ACC)), ("mul", (Ref(3), B))), 1),
        ((("sub", (ACC, A)),), None),
        ((("add", (ACC, 1.0)),), None),
        ((("add", (ACC, A)), ("mul", (Ref(3), A))), None),  # read elsewhere
        ((("add", (ACC, A)), ("mul", (Ref(3), ACC))), None),
        ((("relu", (ACC,)), ("add", (Ref(3), A))), None),
        ((("add", (ACC, A), HALF), ("relu", (Ref(3),))), None),  # rounded
        ((("add", (ACC, ACC)),), None),
    ],
)
def test_a_bias(steps: tuple[tuple[str, tuple[Value, ...]], ...], expected: int | None) -> None:
    assert program(Ref(2 + len(steps)), *steps).bias() == expected
