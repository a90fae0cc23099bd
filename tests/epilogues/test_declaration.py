"""How many operands a function may have, and which name it has. What is refused is in tests/net/refused.txt."""

from __future__ import annotations

import pytest

from epigemm.epilogues.declaration import trace
from tests.support.formulas import formula


@pytest.mark.parametrize(("kind", "most"), [("PerColumn", 4), ("Scalar", 4), ("PerRow", 2), ("Matrix", 2)])
def test_limits(kind: str, most: int) -> None:
    names = [f"a{number}" for number in range(most)]
    parameters = ", ".join(f"{name}: {kind}" for name in names)
    assert len(trace(formula(f"acc, {parameters} -> acc + {' + '.join(names)}")).operands) == most


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "epilogue"), ("a\nb", "epilogue"), ("<lambda>", "epilogue"), ("a" * 5000, "a" * 64)],
)
def test_a_name_that_is_no_identifier_goes_nowhere(name: str, shown: str) -> None:
    function = formula("acc, bias: PerColumn -> acc + bias")
    function.__name__ = name
    assert trace(function).name == shown
