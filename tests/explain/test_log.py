"""The calls that a function would make, found out without making them."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.explain.log import Launch, logged, texts_of
from epigemm.packs import weight_packs

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
    (fold,) = [each for each in opened.told if isinstance(each, Launch)]
    assert "fold of 8 columns" in fold.kernels[0]
    assert out is None or bool((out == 7.0).all()), "nothing is written"


def test_casts_are_told() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, opened = logged(epigemm.linear, x, weight, bias)
    *casts, _ = texts_of(opened.told)
    assert casts[0] == "torch cast of [4, 16] from float32 to bfloat16" and len(casts) == 3


def test_what_is_no_function_of_ours_is_refused() -> None:
    for wrong in (torch.relu, "no_such", lambda x: x):
        with pytest.raises(ValueError, match=r"fn_or_name: got .*; accepted are"):
            logged(wrong, x)


@pytest.mark.parametrize("has_product", [True, False])
def test_a_batch_norm_that_is_not_folded(has_product: bool) -> None:
    """By PyTorch's operators, also where nothing else is called."""
    ones, x = torch.ones(8, dtype=torch.bfloat16), torch.randn(4, 8).bfloat16()
    given = (x, torch.ones(3, 8).bfloat16(), None) if has_product else (x,)
    vectors = [ones[: 3 if has_product else 8]] * 2
    found = epigemm.explain(
        "linear_scale_batch_norm" if has_product else "scale_batch_norm", *given, None, *vectors, eps=1e-60
    )
    behind = found.kernels[-3:]
    assert [each.partition(" of ")[0] for each in behind] == ["torch cast", "torch batch_norm", "torch cast"]
    assert found.path == ("gemm+elementwise" if has_product else "reference")


def test_no_pack_expires() -> None:
    """As it does where a gradient of the weight is recorded."""
    learnt = torch.nn.Parameter(torch.randn(64, 64))
    pack = weight_packs.keep(learnt, 2)
    assert "recorded" in str(epigemm.explain("linear_gelu", torch.randn(8, 64), learnt))
    assert pack.is_current(learnt)


@pytest.mark.parametrize("name", ["linear_gelu", "linear_scale", "linear_glu"])
def test_what_stands_for_results_is_zero(name: str) -> None:
    """Never memory as it was found."""
    _, opened = logged(
        name, x, weight.clone().requires_grad_(), bias, *([torch.ones(8)] if name == "linear_scale" else [])
    )
    assert not bool(opened.returned.any()) and opened.returned.requires_grad
