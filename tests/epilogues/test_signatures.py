"""Annotations that are strings, as all are in this file; how an epilogue's calls look to `inspect` and `help`."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, Scalar
from epigemm.epilogues.declaring import trace

if TYPE_CHECKING:
    from typing import Optional

    import epigemm as imported_for_checkers
    from epigemm import PerColumn as Renamed
    from epigemm import PerRow


@epigemm.epilogue
def swish_clamp(acc: Tensor, bias: PerColumn, residual: Matrix, limit: Scalar = 1.0) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) + residual


SHOWN = "(x, weight, bias, residual, *, limit=1.0, out=None, precision=None, strict=False)"


def test_the_signature_is_that_of_a_call() -> None:
    signature = inspect.signature(swish_clamp)
    assert str(signature) == SHOWN
    x, weight, bias, residual = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6), torch.randn(4, 6)
    bound = signature.bind(x, weight, bias, residual, limit=0.5)
    expected = swish_clamp(x, weight, bias, residual, 0.5)
    assert torch.equal(swish_clamp(*bound.args, **bound.kwargs), expected)


def test_help_shows_the_call_and_says_what_it_takes() -> None:
    text = pydoc.plain(pydoc.render_doc(swish_clamp))
    assert f"swish_clamp{SHOWN}" in text
    for words in ("bias: a tensor [N].", "residual: a tensor of the result's shape.", "limit: a number"):
        assert words in text
    assert "traced" not in text, "of the class, not of the function"


def test_a_functions_own_docstring_comes_first() -> None:
    @epigemm.epilogue
    def described(acc: Tensor, bias: PerColumn | None = None) -> Tensor:
        """Shift the product.

        By a bias.
        """
        return acc if bias is None else acc + bias

    text = described.__doc__ or ""
    assert text.startswith("Shift the product.\n\nBy a bias.\n\nArgs:\n    x: ")
    assert "    bias: a tensor [N] or None." in text
    assert str(inspect.signature(described)).startswith("(x, weight, bias=None, *, out=None")


def test_a_scalar_that_others_follow_keeps_its_place() -> None:
    @epigemm.epilogue
    def shifted(acc: Tensor, limit: Scalar = 1.0, bias: PerColumn | None = None) -> Tensor:
        return torch.clamp(acc if bias is None else acc + bias, max=limit)

    assert str(inspect.signature(shifted)).startswith("(x, weight, limit=1.0, bias=None, *, out=None")


def test_one_in_a_class_is_no_method() -> None:
    class Holder:
        Column = PerColumn

        @epigemm.epilogue
        def shifted(acc: Tensor, bias: Column) -> Tensor:  # type: ignore[valid-type]
            return acc + bias

    assert Holder().shifted is Holder.shifted
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    assert torch.allclose(Holder().shifted(x, weight, bias), x @ weight.t() + bias, atol=1e-5)


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
        (_accumulator, r"'acc' has the annotation 'nowhere.Array', .* accepted is Tensor or none"),
        (_of_another_kind, r"'acc' is the accumulator, .* got 'float'"),
    ],
)
def test_what_names_nothing_is_refused_by_its_name(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        trace(function)
