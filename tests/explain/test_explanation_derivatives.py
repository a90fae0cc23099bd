"""What explain() says of the derivative, and that the derivative does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.registry import EPILOGUES
from epigemm.explain.explanation import backward_linear
from tests.support.pieces import Road
from tests.support.public import PUBLIC, Public
from tests.support.untyped import backward

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)

KERNEL = "one derivative kernel"
REFERENCE = "the epilogue's differentiable PyTorch reference"
AGAIN = "the product again (at the call's precision), as a strict call stays one kernel"
ROUNDED = "the product again (in 16 bits with an fp32 result), as one saved in 16 bits would be rounded ahead"


@pytest.mark.parametrize(
    ("epilogue", "dtype", "of_operands", "strict", "expected"),
    [
        ("bias", torch.float32, False, False, "nothing for the epilogue"),
        ("bias", torch.bfloat16, False, True, "nothing for the epilogue"),
        ("bias_relu", torch.float32, False, False, "threshold_backward on the saved result"),
        ("bias_relu", torch.float16, False, True, "threshold_backward on the saved result"),
        (
            "relu_div",
            torch.float32,
            False,
            False,
            f"{REFERENCE} on the saved product",
        ),
        (
            "relu_div",
            torch.bfloat16,
            False,
            False,
            f"{REFERENCE} on the saved product",
        ),
        ("relu_div", torch.float32, True, False, f"{REFERENCE} on the saved product"),
        ("relu_div", torch.float32, False, True, AGAIN),
        ("relu_div", torch.bfloat16, False, True, "(in 16 bits with an fp32 result), as a strict call"),
        ("sigmoid_scale_residual", torch.float64, False, False, "on the saved product"),
        ("sigmoid_scale_residual", torch.float64, True, True, AGAIN),
        (
            "scale_batch_norm",
            torch.float32,
            False,
            False,
            f"{REFERENCE}; it reads no",
        ),
        (
            "scale_batch_norm",
            torch.bfloat16,
            False,
            True,
            f"{REFERENCE}; it reads no",
        ),
        ("scale_batch_norm", torch.float32, True, False, f"{REFERENCE} on the saved product"),
        ("scale_batch_norm", torch.float32, True, True, AGAIN),
        ("scale_batch_norm", torch.bfloat16, True, False, ROUNDED),
        ("scale_batch_norm", torch.float16, True, True, "(in 16 bits with an fp32 result), as a strict call"),
    ],
)
def test_what_it_says_of_the_derivative(
    epilogue: str, dtype: torch.dtype, of_operands: bool, strict: bool, expected: str
) -> None:
    places = EPILOGUES[epilogue].operands
    operands = [None if each.name == "bias" else torch.ones(3, requires_grad=of_operands) for each in places]
    x = torch.ones(2, 3, dtype=dtype)
    call = LinearCall(EPILOGUES[epilogue], x, x, operands=operands, strict=strict)
    text = backward_linear(call)
    assert expected in text
    assert text.endswith("gradients of x and weight, where asked for, at the call's precision")


def differentiable(function: Public, dtype: torch.dtype, which: str, rng: torch.Generator) -> dict[str, Any]:
    """Arguments of a call that a gradient of x, or of every tensor, is asked for."""
    arguments = function.draw(rng, dtype=dtype, tensor_scalar=True)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and "running" not in name:
            value.requires_grad_(which == "all" or name == "x")
    return arguments


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["x", "all"])
def test_the_derivative_does_what_it_says(
    function: Public, dtype: torch.dtype, which: str, rng: torch.Generator
) -> None:
    arguments = differentiable(function, dtype, which, rng)
    explanation = epigemm.explain(function.name, **arguments)
    said = explanation.backward
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        result = function.call(**arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        backward(result.sum())
    launched = {event.key: event.count for event in run.key_averages()}
    products = sum(launched.get(f"aten::{name}", 0) for name in ("mm", "addmm"))
    wanted = (1 if which == "x" else 2) if function.is_linear else 0
    assert products == wanted + said.startswith("the product again"), said
    assert ("epigemm::_derivative_out" in launched) is (KERNEL in said), said
    assert ("the saved result" not in said) or launched["aten::threshold_backward"] == 1
    calls = sum(event.count for event in forward.key_averages() if event.key.startswith("epigemm::"))
    assert calls > 0 or "torch relu" in explanation.kernels
    saves = "on the saved product" in said
    assert saves == any(reason.startswith("gradients are recorded") for reason in explanation.reasons)


def test_without_a_gradient_it_says_what_would_be(rng: torch.Generator) -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    assert epigemm.explain("linear_relu_div", x, weight, out=torch.empty(4, 3)).backward.startswith("none: ")
    assert epigemm.explain("linear_relu_div", x, weight).backward.startswith("not needed: ")
    explanation = epigemm.explain("linear_relu_div", x, weight)
    assert "on the saved product" in explanation.backward
    assert not any("gradients are recorded" in reason for reason in explanation.reasons)


@pytest.mark.parametrize("strict", [False, True])
def test_a_saved_product_takes_the_fused_epilogue(strict: bool, road: Road) -> None:
    """fp32 on fp16 slices: one kernel stores the product, too, unless the call is strict."""
    x, weight = road.x().requires_grad_(), road.weight()
    explanation = epigemm.explain("linear_relu_div", x, weight, divisor=2.0, strict=strict)
    epigemm.linear_relu_div(x, weight, divisor=2.0, strict=strict)
    assert len(road.take()) == 1
    gemm = next(kernel for kernel in explanation.kernels if "fused GEMM" in kernel)
    if strict:
        assert explanation.path == "fused" and gemm.endswith("epilogue relu_div")
        assert explanation.backward.startswith("the product again")
    elif explanation.path != "fused":  # the planner expects two kernels to be faster on this GPU
        assert road.device.type == "cuda" and "a kernel of its own" in explanation.reasons[0]
    else:
        assert gemm == explanation.kernel
        assert not any(kernel.endswith(" relu_div") for kernel in explanation.kernels)
        assert "stores the product" in explanation.reasons[0]
