"""The words of explanations."""

from __future__ import annotations

import pytest
import torch

from epigemm.arguments.calls import ElementwiseCall
from epigemm.epilogues.registry import EPILOGUES
from epigemm.explain import words


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "expected"),
    [
        (torch.float64, "ieee", "float64"),
        (torch.float32, "ieee", "ieee float32"),
        (torch.float32, "tf32", "tf32 products, float32 accumulation"),
        (torch.bfloat16, "ieee", "bfloat16 products, float32 accumulation"),
    ],
)
def test_what_numbers_are_multiplied_in(dtype: torch.dtype, arithmetic: str, expected: str) -> None:
    assert words.arithmetic_text(dtype, arithmetic) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whose_kernel_it_is(device: str) -> None:
    x, owner = torch.ones(2, 3, device=device), "PyTorch reference,"
    assert words.kernel_owner(x) == owner
    call = ElementwiseCall(EPILOGUES["relu_div"], x, (None, 2.0))
    assert words.in_its_own_kernel(call) == f"{owner} relu_div"
