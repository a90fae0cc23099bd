"""Which names and parameters a decorated function may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow, Scalar

WEIGHT = torch.ones(7)


def too_many(kind: type, count: int) -> Callable[..., Tensor]:
    names = [f"a{number}" for number in range(count)]
    namespace: dict[str, Any] = {}
    exec(f"def many(acc, {', '.join(names)}):\n    return acc + {' + '.join(names)}", namespace)
    many = namespace["many"]
    many.__annotations__ = dict.fromkeys(names, kind)
    assert callable(many)
    return many  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "most"), [(PerColumn, 4), (Scalar, 4), (PerRow, 2), (Matrix, 2)])
def test_limits(kind: type, most: int) -> None:
    assert len(trace(too_many(kind, most)).operands) == most
    with pytest.raises(ValueError, match=f"got {most + 1} operands of kind .*; accepted are at most {most}"):
        trace(too_many(kind, most + 1))


def _star(acc: Tensor, *others: PerColumn) -> Tensor:
    return acc


def _keywords(acc: Tensor, **others: PerColumn) -> Tensor:
    return acc


def _keyword_only(acc: Tensor, *, bias: PerColumn) -> Tensor:
    return acc


def _unannotated(acc, bias):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    return acc


def _unknown(acc: Tensor, bias: float) -> Tensor:
    return acc


def _accumulator(acc: PerColumn) -> Any:
    return acc


def _default_vector(acc: Tensor, bias: PerColumn = WEIGHT) -> Tensor:
    return acc


def _default_text(acc: Tensor, s: Scalar = "1") -> Tensor:  # type: ignore[assignment]
    return acc


def _empty() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_star, r"\*others is not supported"),
        (_keywords, r"\*others is not supported"),
        (_keyword_only, "'bias' is keyword-only"),
        (_unannotated, "'bias' has no annotation; accepted is PerColumn"),
        (_unknown, "'bias' has 'float'; accepted is PerColumn"),
        (_accumulator, "'acc' is the accumulator"),
        (_default_vector, "'bias' has a default of type Tensor"),
        (_default_text, "'s' has a default of type str"),
        (_empty, "takes no argument"),
        (print, "got builtin_function_or_method; accepted is a Python function"),
    ],
)
def test_signatures(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        trace(function)


def _acc_and(name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"PerColumn": PerColumn}
    exec(f"def renamed(acc, {name}: PerColumn):\n    return acc + {name}", namespace)
    renamed: Callable[..., Any] = namespace["renamed"]
    return renamed


@pytest.mark.parametrize("name", ["out", "precision", "strict"])
def test_keywords_of_calls_name_no_operand(name: str) -> None:
    message = f"renamed .*: an operand is called '{name}'; accepted is any name but out, precision, strict, which are"
    with pytest.raises(TypeError, match=message):
        trace(_acc_and(name))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "epilogue"), ("a\nb", "epilogue"), ("<lambda>", "epilogue"), ("a" * 5000, "a" * 64)],
)
def test_a_name_that_is_no_identifier_goes_nowhere(name: str, shown: str) -> None:
    function = _acc_and("bias")
    function.__name__ = name
    assert trace(function).name == shown
