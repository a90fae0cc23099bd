"""How an epilogue's calls look to `inspect` and `help`."""

from __future__ import annotations

import inspect
import pydoc

import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, Scalar


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
