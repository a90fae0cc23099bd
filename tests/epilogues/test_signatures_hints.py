"""Annotations that are strings, as all are in this file. What names nothing is in tests/net/refused.txt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, TypeAlias

import pytest
from torch import Tensor

from epigemm import PerColumn, Scalar
from epigemm.epilogues.declaration import trace

if TYPE_CHECKING:
    import epigemm as imported_for_checkers
    from epigemm import PerColumn as Renamed
    from epigemm import PerRow


def kinds_of(function: Any) -> list[str]:
    return [operand.kind for operand in trace(function).operands]


def test_names_of_the_function_around() -> None:
    Column: TypeAlias = PerColumn
    Number: TypeAlias = Scalar

    def shifted(acc: Tensor, bias: Column, by: Number) -> Tensor:
        return acc + bias + by

    assert kinds_of(shifted) == ["per_column", "scalar"]


def test_names_that_are_imported_for_checkers_alone() -> None:
    def shifted(acc: Tensor, bias: imported_for_checkers.PerColumn, gain: PerRow | None = None) -> Tensor:
        return acc + bias if gain is None else (acc + bias) * gain

    assert kinds_of(shifted) == ["per_column", "per_row"]


def test_a_renamed_one_is_refused_by_its_name() -> None:
    def shifted(acc: Tensor, bias: Renamed) -> Tensor:
        return acc + bias

    with pytest.raises(TypeError, match="'bias' has the annotation 'Renamed', which names nothing here"):
        trace(shifted)


@pytest.mark.parametrize("annotation", [PerColumn, Optional[PerColumn], "PerColumn", "PerColumn | None"])  # noqa: UP045
def test_optional_ones(annotation: Any) -> None:
    def function(acc: Tensor, bias: Any = None) -> Tensor:
        return acc * 2 if bias is None else acc * bias

    function.__annotations__["bias"] = annotation
    traced = trace(function)
    assert traced.operands[0].kind == "per_column" and traced.operands[0].is_optional
    assert [form.operands for form in traced.without.values()] == [()]
