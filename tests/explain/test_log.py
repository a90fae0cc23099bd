"""The calls that a function would make, found out without making them."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.explain.log import logged

x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)


def test_a_call_is_told() -> None:
    name, opened = logged(epigemm.linear_silu, x, weight, bias)
    (told,) = opened.calls
    call = told.call
    assert name == "linear_silu" and isinstance(call, LinearCall)
    assert call.x is x and call.weight is weight and call.bias is bias and call.epilogue.name == "bias_silu"
    _, opened = logged("bias_relu", x, torch.randn(16))
    assert isinstance(opened.calls[0].call, ElementwiseCall)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_out", [False, True])
def test_a_folded_batch_norm_is_one_call(dtype: torch.dtype, has_out: bool) -> None:
    """In 16 bits, too, where a tracer sees a product with its bias and then the fold."""
    given = [each.to(dtype) for each in (x, weight, bias)]
    out = torch.full((4, 8), 7.0, dtype=dtype) if has_out else None
    _, opened = logged("linear_scale", *given, torch.rand(8), out=out)
    (told,) = opened.calls
    call = told.call
    assert isinstance(call, LinearCall) and call.out is out
    assert call.epilogue.name == "scale_batch_norm" and len(call.operands) == 2 and call.bias is None
    assert len(told.before) == 1 and "fold of 8 columns" in told.before[0]
    assert out is None or bool((out == 7.0).all()), "nothing is written"


def test_casts_are_told() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, opened = logged(epigemm.linear, x, weight, bias)
    (told,) = opened.calls
    assert told.before[0] == "torch cast of [4, 16] from float32 to bfloat16" and len(told.before) == 3


def test_what_is_no_function_of_ours_is_refused() -> None:
    for wrong in (torch.relu, "no_such", lambda x: x):
        with pytest.raises(ValueError, match=r"fn_or_name: got .*; accepted are"):
            logged(wrong, x)
