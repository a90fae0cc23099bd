"""A chain as a function and as an epilogue: by hand, against the calls that it is made of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, SCALAR
from epigemm.fusion.formula import (
    ChainFormula,
    ChainStep,
    Slot,
    epilogue_of,
    name_of,
    out_of_place,
    text_of,
)
from epigemm.user_epilogue import UserEpilogue

ACC, RESULT = Slot(0), Slot(1)
acc, vector, matrix = torch.randn(5, 8), torch.randn(8), torch.randn(5, 8)


def made(*steps: ChainStep, kinds: tuple[str, ...] = (PER_COLUMN, MATRIX)) -> ChainFormula:
    return ChainFormula(kinds, steps)


GATE = made(
    ChainStep(operator.add, (ACC, Slot(-1))),
    ChainStep(F.silu, (RESULT,), (("inplace", True),)),
    ChainStep("mul", (Slot(2), Slot(-2))),
)


def test_a_formula_computes_its_steps() -> None:
    torch.testing.assert_close(GATE(acc, vector, matrix), F.silu(acc + vector) * matrix)
    scaled = made(ChainStep(torch.div, (ACC, Slot(-1))), kinds=(SCALAR,))
    torch.testing.assert_close(scaled(acc, 4.0), acc / 4.0)


def test_an_epilogue_computes_the_same() -> None:
    epilogue = epilogue_of(GATE)
    assert isinstance(epilogue, UserEpilogue) and epilogue.traced.name == "add_silu_mul"
    torch.testing.assert_close(epilogue.traced.reference(acc, vector, matrix), GATE(acc, vector, matrix))
    assert text_of(epilogue) == "((acc + c1) * sigmoid(acc + c1)) * m1"


def test_equal_formulas_have_one_epilogue() -> None:
    def scaled(number: Any) -> ChainFormula:
        return made(ChainStep(torch.mul, (ACC, number)), kinds=())

    assert epilogue_of(scaled(2.0)) is epilogue_of(scaled(2.0))
    for one, other in ((0.0, -0.0), (1, True), (1, 1.0), (2.0, 3.0)):
        assert scaled(one).key != scaled(other).key
        assert epilogue_of(scaled(one)) is not epilogue_of(scaled(other))
    assert scaled(float("nan")).key == scaled(float("nan")).key


def test_what_is_no_epilogue_has_a_reason() -> None:
    found = epilogue_of(made(ChainStep(torch.cumsum, (ACC, 1)), kinds=()))
    assert isinstance(found, str) and "cumsum" in found
    found = epilogue_of(made(ChainStep(torch.flip, (ACC, [0])), kinds=()))
    assert isinstance(found, str) and "moves elements" in found


@pytest.mark.parametrize(
    ("target", "arguments", "named", "expected"),
    [
        ("relu_", (), {}, torch.relu),
        ("mul_", (3.0,), {}, lambda x: x * 3.0),
        ("__add__", (1.0,), {}, lambda x: x + 1.0),
        (torch.relu_, (), {}, torch.relu),
        (torch.sigmoid_, (), {}, torch.sigmoid),
        (F.relu, (), {"inplace": True}, torch.relu),
        (F.leaky_relu, (0.2, True), {}, lambda x: F.leaky_relu(x, 0.2)),
        (F.hardtanh_, (), {}, F.hardtanh),
        (operator.iadd, (1.0,), {}, lambda x: x + 1.0),
        (operator.imul, (2.0,), {}, lambda x: x * 2.0),
        (torch.tanh, (), {}, torch.tanh),
    ],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", ""),
)
def test_nothing_is_written(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], expected: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 4)
    before = x.clone()
    torch.testing.assert_close(out_of_place(target, (x, *arguments), named), expected(before))
    assert torch.equal(x, before)


def test_names() -> None:
    steps = [
        ChainStep(torch.relu, (ACC,)),
        ChainStep("mul_", (RESULT, 2.0)),
        ChainStep(torch.relu, (Slot(2),)),
    ]
    assert name_of(steps) == "relu_mul"
    assert name_of([]) == "pointwise"
    long = [ChainStep(name * 9, (ACC,)) for name in ("abc", "def", "ghi")]
    assert name_of(long) == "abcabcabcabcabcabcabcabcabc_defdefdefdef"
