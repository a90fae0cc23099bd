"""Annotations that are strings, as all are in this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from torch import Tensor

from epigemm import PerColumn, Scalar
from epigemm.epilogues.declaration import trace

if TYPE_CHECKING:
    from typing import Optional

    import epigemm as imported_for_checkers
    from epigemm import PerColumn as Renamed
    from epigemm import PerRow


def kinds_of(function: Callable[..., Any]) -> list[str]:
    return [operand.kind for operand in trace(function).operands]


def test_names_of_the_function_around() -> None:
    Column: TypeAlias = PerColumn
    Number: TypeAlias = Scalar

    def shifted(acc: Tensor, bias: Column, by: Number) -> Tensor:
        return acc + bias + by

    assert kinds_of(shifted) == ["per_column", "scalar"]


def test_names_that_are_imported_for_checkers_alone() -> None:
    def shifted(
        acc: Tensor,
        bias: imported_for_checkers.PerColumn,
        other: Optional[PerColumn] = None,  # noqa: UP045
        gain: PerRow | None = None,
    ) -> Tensor:
        shifted = acc + bias if other is None else acc + bias + other
        return shifted if gain is None else shifted * gain

    assert kinds_of(shifted) == ["per_column", "per_column", "per_row"]


def _renamed(acc: Tensor, bias: Renamed) -> Tensor:
    return acc + bias


def _nowhere(acc: Tensor, bias: nowhere.PerColumns) -> Tensor:  # type: ignore[name-defined] # noqa: F821
    return acc


def _of_many(acc: Tensor, bias: list[PerColumn]) -> Tensor:
    return acc


def _accumulator(acc: nowhere.Array, bias: PerColumn) -> Any:  # type: ignore[name-defined] # noqa: F821
    return acc


def _of_another_kind(acc: float, bias: PerColumn) -> float:
    return acc


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            _renamed,
            r"'bias' has the annotation 'Renamed', which names nothing here \(NameError: name 'Renamed' is",
        ),
        (
            _nowhere,
            r"'bias' has the annotation 'nowhere.PerColumns', which names nothing here \(NameError: name",
        ),
        (_of_many, r"'bias' has 'list\[PerColumn\]'; accepted is PerColumn, PerRow"),
        (_accumulator, r"'acc' has the annotation 'nowhere.Array', .* accepted is Tensor or none"),
        (_of_another_kind, r"'acc' is the accumulator, .* got 'float'"),
    ],
)
def test_what_names_nothing_is_refused_by_its_name(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        trace(function)
