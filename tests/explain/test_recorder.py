"""Which operators a call would run, found out without running them."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.explain.recorder import record

x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)


def test_a_call_is_caught() -> None:
    name, recorder = record(epigemm.linear_silu, x, weight, bias)
    operator, call = recorder.taken_apart()
    assert (name, operator) == ("linear_silu", "linear") and isinstance(call, LinearCall)
    assert call.x is x and call.weight is weight and call.bias is bias and call.epilogue.name == "bias_silu"
    _, recorder = record("bias_relu", x, torch.randn(16))
    assert isinstance(recorder.taken_apart()[1], ElementwiseCall)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_out", [False, True])
def test_a_folded_batch_norm_is_one_call(dtype: torch.dtype, has_out: bool) -> None:
    """In 16 bits, too, where whoever traces it sees a product with its bias and then the fold."""
    given = [each.to(dtype) for each in (x, weight, bias)]
    out = torch.full((4, 8), 7.0, dtype=dtype) if has_out else None
    _, recorder = record("linear_scale", *given, torch.rand(8), out=out)
    operator, call = recorder.taken_apart()
    assert operator == ("linear_out" if has_out else "linear") and isinstance(call, LinearCall)
    assert call.epilogue.name == "scale_batch_norm" and len(call.operands) == 2 and call.bias is None
    assert recorder.folded_bias is given[2] or recorder.folded_bias is not None
    assert len(recorder.folds) == 1 and call.out is out
    assert out is None or bool((out == 7.0).all()), "nothing is written"


def test_casts_are_noted() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, recorder = record(epigemm.linear, x, weight, bias)
    assert recorder.casts[0] == "torch cast of [4, 16] from float32 to bfloat16" and len(recorder.casts) == 3


def test_what_is_no_function_of_ours_is_refused() -> None:
    for wrong in (torch.relu, "no_such", lambda x: x):
        with pytest.raises(ValueError, match=r"fn_or_name: got .*; accepted are"):
            record(wrong, x)
