"""Programs written by hand: what they read, where a gradient ends, which operand is a bias, and unused steps."""

from __future__ import annotations

import pytest

from epigemm.epilogues.tracer.program import (
    BOOL,
    HALF,
    REAL,
    Program,
    Ref,
    Step,
    Value,
)

ACC, A, B = Ref(0), Ref(1), Ref(2)


def program(
    result: Value, *steps: tuple[str, tuple[Value, ...]] | tuple[str, tuple[Value, ...], str]
) -> Program:
    """Of two operands."""
    made = [Step(each[0], each[1], each[2] if len(each) > 2 else REAL, "file.py:1") for each in steps]
    return Program(2, tuple(made), result)


@pytest.mark.parametrize("end", [("lt", (A, 0.0), BOOL), ("detach", (A,))])
def test_where_a_gradient_ends(end: tuple[str, tuple[Value, ...]]) -> None:
    """Behind a comparison or `detach`; another way around it has one."""
    ended = program(Ref(4), end, ("mul", (ACC, Ref(3))))
    assert ended.reads() == {0, 1} and ended.with_gradient() == {0}
    around = program(Ref(5), end, ("mul", (ACC, Ref(3))), ("add", (Ref(4), A)))
    assert around.with_gradient() == {0, 1}
    assert program(Ref(3), end).with_gradient() == program(1.0).with_gradient() == frozenset()


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
