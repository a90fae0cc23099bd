"""A trace as a graph of PyTorch operators: equal to the function, and to be differentiated, batched and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import Scalar
from tests.epilogues.tracer.functions import arguments, swish_clamp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reference(dtype: torch.dtype) -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced)
    operands[3] = operands[3].abs()
    acc, *operands = (value.to(dtype) for value in (acc, *operands))
    expected = swish_clamp(acc, *operands)  # type: ignore[arg-type]
    torch.testing.assert_close(traced.reference(acc, *operands), expected)
    torch.testing.assert_close(traced.reference(acc, *operands[:3], float(operands[3])), expected)
    with pytest.raises(TypeError, match="got 1 operands; accepted are 4"):
        traced.reference(acc, operands[0])


def test_scalars_stay_run_time() -> None:
    def scalars(acc: Tensor, low: Scalar, high: Scalar) -> Any:
        return torch.where(acc > low, acc * (high - low) ** 2, torch.full_like(acc, high)) / abs(high)

    traced = trace(scalars)
    acc, _ = arguments(traced)
    for low, high in ((-0.5, 0.25), (0.75, -2.0), (0.0, 1.0)):
        expected = torch.where(acc > low, acc * (high - low) ** 2, torch.full_like(acc, high)) / abs(high)
        torch.testing.assert_close(traced.reference(acc, low, high), expected)
