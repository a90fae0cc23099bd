"""`torch.autocast`: the dtype and the numbers are those of the PyTorch program under it."""

from __future__ import annotations

import pytest
import torch

from tests.ops.bounds import assert_right
from tests.ops.op import COUNT, Op, map_tensors, results_of
from tests.ops.table import rows

of_each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


CAST = ("x", "weight", "bias", "weight2", "bias2")
"""What `F.linear` casts."""


@rows("autocast", lambda op: op.is_linear and not op.of_kind(COUNT))
@of_each_dtype
def test_of_products(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """x, weight and bias are cast, as those of `F.linear`; fp64 stays.

    Results have the dtype to which PyTorch promotes: fp32 beside an fp32 residual. Of BatchNorm, whose vectors are fp32
    beside any x, and of functions of users, whose numbers are compared alone, that is another matter.
    """
    arguments = op.draw(rng, device=device)
    with torch.autocast(device.type, dtype=dtype):
        got = results_of(op.call(**arguments))
        exact = op.call(**map_tensors(arguments, torch.Tensor.double))
        promoted = [each.dtype for each in results_of(op.reference(**arguments))]
    if not op.name.startswith("@") and "running_mean" not in op.operands:
        assert [each.dtype for each in got] == promoted
    is_cast = op.name.startswith("@")  # a user's operands may be
    names = [name for name in CAST if isinstance(arguments.get(name), torch.Tensor)]
    cast = arguments | {name: arguments[name].to(dtype) for name in names if not is_cast or name != "bias"}
    rounded = [each.to(result.dtype(dtype)) for each, result in zip(got, op.results, strict=True)]
    assert_right(op, tuple(rounded), cast, dtype, times=2.0)
    assert_right(op, exact, map_tensors(arguments, torch.Tensor.double), torch.float64)
    with torch.autocast(device.type, enabled=False):
        assert [each.dtype for each in results_of(op.call(**arguments))] == [
            result.dtype(torch.float32) for result in op.results
        ]


@rows("autocast elementwise", lambda op: not op.is_linear)
@of_each_dtype
def test_elementwise_calls_stay(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """They have no product that would be cast."""
    arguments = op.draw(rng, device=device)
    with torch.autocast(device.type, dtype=dtype):
        got = op.call(**arguments)
    assert_right(op, got, arguments, torch.float32)
