"""How many operands a function may have, and which name it has. What is refused is in tests/net/refused.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow, Scalar


def of_operands(kind: type, count: int) -> Callable[..., Any]:
    names = [f"a{number}" for number in range(count)]
    namespace: dict[str, Any] = {}
    exec(f"def many(acc, {', '.join(names)}):\n    return acc + {' + '.join(names)}", namespace)
    many: Callable[..., Any] = namespace["many"]
    many.__annotations__ = dict.fromkeys(names, kind)
    return many


@pytest.mark.parametrize(("kind", "most"), [(PerColumn, 4), (Scalar, 4), (PerRow, 2), (Matrix, 2)])
def test_limits(kind: type, most: int) -> None:
    assert len(trace(of_operands(kind, most)).operands) == most


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "epilogue"), ("a\nb", "epilogue"), ("<lambda>", "epilogue"), ("a" * 5000, "a" * 64)],
)
def test_a_name_that_is_no_identifier_goes_nowhere(name: str, shown: str) -> None:
    function = of_operands(PerColumn, 1)
    function.__name__ = name
    assert trace(function).name == shown
