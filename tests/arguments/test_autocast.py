"""What autocast makes of a product's inputs and of a call's type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm.arguments import autocast

HALF = torch.bfloat16
fp32, fp64, half = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=HALF)


def test_outside_of_it_nothing_changes() -> None:
    x, weight, (bias, none) = autocast.cast(fp32, fp32, fp32, None)
    assert x is weight is bias is fp32 and none is None
    assert autocast.dtype_for(fp32) is None and not autocast.promotes(half, [fp32])


@pytest.mark.parametrize(("given", "dtype"), [(fp32, HALF), (half, HALF), (fp64, torch.float64)])
def test_floating_tensors_but_fp64_are_cast(given: torch.Tensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", HALF):
        x, weight, biases = autocast.cast(given, fp32, given, None, 2.0)
    assert x.dtype is dtype and weight.dtype is HALF
    assert biases[0].dtype is dtype and biases[1:] == (None, 2.0)


def test_tensors_elsewhere_and_other_arguments_are_left() -> None:
    there: Any = torch.ones(2, 2, device="meta")
    wrong: Any = "no tensor"
    with torch.autocast("cpu", HALF):
        assert autocast.cast(there, fp32)[:2] == (there, fp32)
        assert autocast.cast(wrong, fp32, fp32) == (wrong, fp32, (fp32,))
        assert autocast.cast(fp32, there)[1] is there


@pytest.mark.parametrize(
    ("x", "operands", "expected"),
    [
        (fp32, [fp32], True),
        (half, [None, half, fp32], True),
        (half, [half, None, 2.0, torch.tensor(1.0)], False),
        (fp64, [fp32], False),
    ],
)
def test_fp32_beside_a_product(x: torch.Tensor, operands: list[Any], expected: bool) -> None:
    with torch.autocast("cpu", HALF):
        assert autocast.promotes(x, operands) == expected


def test_strict_calls_are_refused() -> None:
    autocast.refuse_strict(False)
    with pytest.raises(RuntimeError, match="strict: got True under autocast"):
        autocast.refuse_strict(True)
