"""How an epilogue's calls look to `inspect` and `help`; annotations. What names nothing is in tests/net/refused.txt."""

from __future__ import annotations

import inspect
import pydoc
from typing import TYPE_CHECKING, Any, Optional, TypeAlias

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, Scalar
from epigemm.epilogues.declaration import trace


@epigemm.epilogue
def swish_clamp(acc: Tensor, bias: PerColumn, residual: Matrix, limit: Scalar = 1.0) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) + residual


SHOWN = (
    "(x, weight, /, bias, residual, *, limit=1.0, out=None, precision=None, strict=False, x_scale=None, "
    "weight_scale=None, out_dtype=None, accumulate='promoted')"
)


def test_the_signature_is_that_of_a_call() -> None:
    signature = inspect.signature(swish_clamp)
    assert str(signature) == SHOWN
    x, weight, bias, residual = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6), torch.randn(4, 6)
    bound = signature.bind(x, weight, bias, residual, limit=0.5)
    expected = swish_clamp(x, weight, bias, residual, 0.5)
    assert torch.equal(swish_clamp(*bound.args, **bound.kwargs), expected)


def test_help_shows_the_call_and_says_what_it_takes() -> None:
    text = pydoc.plain(pydoc.render_doc(swish_clamp))
    if hasattr(swish_clamp, "__get__"):  # from torch 2.13 on, whose Dynamo reads such attributes of modules
        assert f"swish_clamp{SHOWN}" in text
    for words in (
        "bias: a tensor [N].",
        "residual: a tensor of the result's shape, or [B, 1, N] beside a result [B, L, N].",
        "limit: a number",
    ):
        assert words in text
    assert "traced" not in text, "of the class, not of the function"


def test_a_scalar_that_others_follow_keeps_its_place() -> None:
    @epigemm.epilogue
    def shifted(acc: Tensor, limit: Scalar = 1.0, bias: PerColumn | None = None) -> Tensor:
        return torch.clamp(acc if bias is None else acc + bias, max=limit)

    assert str(inspect.signature(shifted)).startswith("(x, weight, /, limit=1.0, bias=None, *, out=None")


def test_one_in_a_class_is_no_method() -> None:
    class Holder:
        Column = PerColumn

        @epigemm.epilogue
        def shifted(acc: Tensor, bias: Column) -> Tensor:  # type: ignore[valid-type]
            return acc + bias

    assert Holder().shifted is Holder.shifted
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    assert torch.allclose(Holder().shifted(x, weight, bias), x @ weight.t() + bias, atol=1e-5)


# --- annotations that are strings, as all are in this file ------------------------------------------------------------


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
