"""The epilogue of a function for the types of a call's operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.arguments import forms
from epigemm.epilogues.library import BIAS


@epigemm.epilogue
def mixed(acc: Tensor, bias: PerColumn, gain: PerRow, other: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) * gain + other


bias, gain, other = torch.randn(8), torch.randn(2, 3), torch.randn(2, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", range(4))
def test_each_choice_of_types_is_one_epilogue(dtype: torch.dtype, wide: int) -> None:
    """Beside 16 bits an operand may be fp32; a scalar always has the arithmetic's type."""
    x = torch.randn(2, 3, 4).to(dtype)
    given = [
        each.float() if place == wide else each.to(dtype) for place, each in enumerate((bias, gain, other))
    ]
    found = forms.of_types(mixed.traced, x, (*given, 2.0))
    is_narrow = dtype is torch.bfloat16
    assert [each.folded for each in found.operands] == [is_narrow and place == wide for place in range(3)] + [
        True
    ]
    assert found is forms.of_types(mixed.traced, x, (*given, torch.tensor(2.0)))
    assert found.bias_place == (0 if is_narrow and wide == 0 else 1)


@pytest.mark.parametrize(("shape", "is_shared"), [((2, 3, 8), False), ((2, 1, 8), True), ((1, 1, 8), True)])
def test_matrices_that_share_rows(shape: tuple[int, ...], is_shared: bool) -> None:
    found = forms.of_types(mixed.traced, torch.randn(2, 3, 4), (bias, gain, torch.randn(shape), 2.0))
    assert [each.shared for each in found.operands] == [False, False, is_shared, False]


def test_operands_as_the_entry_takes_them() -> None:
    x = torch.randn(2, 3, 4)
    epilogue, given = forms.seen(mixed.traced, x, (bias, gain, other, 2.0))
    assert epilogue is forms.of_types(mixed.traced, x, (bias, gain, other, 2.0))
    assert isinstance(given[1], Tensor) and given[1].shape == (2, 3, 1)
    assert given[0] is bias and given[2] is other and given[3] == 2.0
    assert forms.seen(BIAS, x, (None,)) == (BIAS, (None,))
