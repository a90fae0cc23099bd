"""Gradients near a kink, and of products that 16 bits do not hold. Others: tests/ops/test_autograd.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epigemm
from tests.support.untyped import backward

ops: Any = torch.ops.epigemm


def test_functional_gradients_of_raw_ops_are_refused() -> None:
    """torch.func.grad does not reach formulas registered for custom operators: that must be said, not be zero."""
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "linear": lambda x: ops.linear("bias_relu", x, weight, None, [], [], "default"),
        "elementwise": lambda x: ops.elementwise("sigmoid", x, None, [], []),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match="functorch"):
            torch.func.grad(lambda x, call=call: call(x).sum())(x)


def test_relu_gradient_agrees_with_the_forward(device: torch.device, rng: torch.Generator) -> None:
    """Products near -bias, which bf16 would round across the kink: only an output above 0 has a gradient."""
    x = torch.randn(64, 256, generator=rng).to(device, torch.bfloat16)
    weight = torch.randn(128, 256, generator=rng).to(device, torch.bfloat16)
    product = x.double() @ weight.double().t()
    near = 1 + 0.01 * torch.randn(128, generator=rng, dtype=torch.float64).to(device)
    bias = (-product[0] * near).to(torch.bfloat16).requires_grad_()
    y = epigemm.linear_relu(x[:1].expand(8, -1), weight, bias)
    backward(y, torch.ones_like(y))
    assert bias.grad is not None
    positive = y.detach() > 0
    assert positive.any() and not positive.all()
    torch.testing.assert_close(bias.grad, positive.sum(0).to(bias.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_product_that_16_bits_do_not_hold(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """The scale's gradient reads it: a small sum beside large terms, and one beyond fp16."""
    x = torch.randn(6, 64, generator=rng).to(device, dtype)
    weight = torch.randn(5, 64, generator=rng).to(device, dtype)
    x[0], weight[0] = 255.0, 255.0
    scale = torch.full((5,), 2.0**-20, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.full((6, 5), 2.0**-10, device=device, dtype=dtype)
    backward(epigemm.linear_scale(x, weight, None, scale), upstream)
    product = x.double() @ weight.double().t()
    assert scale.grad is not None and float(product[0, 0]) > 65504
    expected = (upstream.double() * product).sum(0)
    assert bool(
        ((scale.grad.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-3).all()
    )


def cancelling(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A product and a bias that leave little of one another."""
    x, weight = torch.rand(64, 256).to(dtype), torch.rand(32, 256).to(dtype)
    return x, weight, (-(x.double() @ weight.double().t()).mean(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_that_cancels_the_product(dtype: torch.dtype) -> None:
    """The scale's gradient is made of their sum: rounded apart to 16 bits they would leave rounding errors."""
    x, weight, bias = cancelling(dtype)
    scale, upstream = torch.randn(32).to(dtype).requires_grad_(), torch.randn(64, 32).to(dtype)
    z = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = (upstream.double() * z).sum(0)
    backward(epigemm.linear_scale(x, weight, bias, scale), upstream)
    assert scale.grad is not None
    error = torch.linalg.vector_norm(scale.grad.double() - expected)
    assert float(error) <= 2 * torch.finfo(dtype).eps * float(torch.linalg.vector_norm(expected))
