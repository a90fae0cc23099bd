"""Gradients of operators that are called directly, and of products that 16 bits do not hold.

Public functions: tests/ops/test_autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epigemm
from epigemm.epilogues import registry
from tests.support.arithmetic import FP64
from tests.support.cases import ELEMENTWISE, LINEAR, Operands, draw_operands, signed
from tests.support.untyped import backward

ops: Any = torch.ops.epigemm


def op_call(name: str, linear: bool, operands: Operands) -> Callable[..., torch.Tensor]:
    """The raw op, and its reference in plain torch, as functions of all their tensors."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        x, *rest = tensors
        weight = [rest.pop(0)] if linear else []
        bias = rest.pop(0) if operands.bias is not None else None
        if linear:
            result = ops.linear(name, x, *weight, bias, rest, operands.scalars, "default")
        else:
            result = ops.elementwise(name, x, bias, rest, operands.scalars)
        return torch.as_tensor(result)

    return call


RAW = [(name, True) for name in LINEAR] + [(name, False) for name in ELEMENTWISE]


@pytest.mark.parametrize(("name", "linear"), RAW, ids=lambda v: str(v))
def test_raw_ops_differentiate(name: str, linear: bool, rng: torch.Generator) -> None:
    """The same gradients as the reference composed by hand, no warning."""
    operands = draw_operands(name, 4, FP64, "cpu", rng, tensor_scalars=linear)
    tensors = [signed((3, 5 if linear else 4), rng)]
    if linear:
        tensors.append(signed((4, 5), rng))
    if operands.bias is not None:
        tensors.append(operands.bias)
    tensors += operands.tensors
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    call = op_call(name, linear, operands)
    actual = call(*ours)
    rest = list(theirs[2 if linear else 1 :])
    bias = rest.pop(0) if operands.bias is not None else None
    acc = theirs[0] @ theirs[1].mT if linear else theirs[0]
    given = registry.EPILOGUES[name].in_order(bias, rest, operands.scalars)
    assert given is not None
    expected = registry.EPILOGUES[name].reference(acc, given)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn(3, 4, dtype=torch.float64)
    backward(actual, upstream)
    backward(expected, upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)
    assert torch.autograd.gradgradcheck(call, ours, fast_mode=True)


def test_fold_batch_norm_differentiates(rng: torch.Generator) -> None:
    vectors = [signed((4,), rng) for _ in range(6)]
    vectors[3] = vectors[3].abs() + 0.5
    leaves_ = [vector.requires_grad_() for vector in vectors]
    like = torch.empty(0, dtype=torch.float64)

    def fold(*given: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(ops.fold_batch_norm(like, *given, 1e-3))

    assert torch.autograd.gradcheck(fold, leaves_)
    assert torch.autograd.gradgradcheck(fold, leaves_)


@pytest.mark.parametrize(("name", "linear"), [RAW[0], RAW[-1]], ids=lambda v: str(v))
def test_functional_gradients_of_raw_ops_are_refused(name: str, linear: bool, rng: torch.Generator) -> None:
    """torch.func.grad does not reach formulas registered for custom operators: that must be said, not be zero."""
    operands = draw_operands(name, 4, FP64, "cpu", rng)
    rest = [signed((4, 5), rng)] if linear else []
    rest += [operands.bias] if operands.bias is not None else []
    call = op_call(name, linear, operands)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: call(x, *rest, *operands.tensors).sum())(
            signed((3, 5 if linear else 4), rng)
        )


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_that_cancels_the_product_under_functional_transforms(dtype: torch.dtype) -> None:
    x, weight, bias = cancelling(dtype)
    z = torch.nn.functional.linear(x, weight, bias)
    _, found = torch.func.grad_and_value(lambda w: epigemm.linear_relu(x, w, bias).sum(dtype=torch.float64))(
        weight
    )
    torch.testing.assert_close(found, torch.relu(z).sum(dtype=torch.float64), rtol=0, atol=0)
