"""Recorded calls that PyTorch's own operators compute: small layers whose products no fused kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as untyped_checkpoint

import epigemm
from epigemm._native import ops
from tests.support.untyped import backends, backward
from tests.support.untyped import torch as untyped
from tests.support.watching import WITH_ENTRY

pytestmark = WITH_ENTRY

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FUNCTIONS: dict[str, Any] = {
    "linear": lambda z: z,
    "linear_relu": torch.relu,
    "linear_gelu": torch.nn.functional.gelu,
    "linear_silu": torch.nn.functional.silu,
}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
functions = pytest.mark.parametrize("name", FUNCTIONS)


def drawn(rng: torch.Generator, device: torch.device, dtype: torch.dtype, *lead: int) -> list[Tensor]:
    # No fused kernel stores rows of 15 elements in 16 bits, nor is fp16x3 accurate at K = 24.
    sizes = ((*(lead or (6,)), 24), (15, 24), (15,))
    return [torch.randn(size, generator=rng).to(device, dtype).requires_grad_() for size in sizes]


def node_name(result: Tensor) -> str:
    return type(result.grad_fn).__name__


@functions
@dtypes
def test_results_and_gradients_are_eagers(
    name: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    x, weight, bias = drawn(rng, device, dtype)
    for given in (
        (x, weight, bias),
        (x, weight, None),
        (x.detach(), weight, bias),
        (x, weight.detach(), None),
    ):
        inputs = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
        eager = FUNCTIONS[name](torch.nn.functional.linear(*given))
        result = getattr(epigemm, name)(*given)
        assert node_name(result) == node_name(eager)
        assert torch.equal(result, eager)
        grad = torch.randn(eager.shape, generator=rng).to(device, dtype)
        expected = torch.autograd.grad(eager, inputs, grad)
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, grad), expected))


@functions
def test_what_is_left_to_a_node_of_ours(name: str, rng: torch.Generator) -> None:
    """Large products, strict calls, other epilogues, and where the call asks for more than torch's setting."""
    call = getattr(epigemm, name)
    x, weight, bias = drawn(rng, torch.device("cpu"), torch.float32)
    assert "_Linear" not in node_name(call(x, weight, bias))
    assert "_Linear" in node_name(call(x, weight, bias, precision="ieee"))  # also in its backward pass
    assert "_Linear" not in node_name(call(x.double(), weight.double(), bias.double(), precision="ieee"))
    assert name == "linear" or "_Linear" not in node_name(call(x[None], weight, bias))
    # Here PyTorch adds the bias after the product is rounded.
    assert "_Linear" in node_name(call(torch.randn(2, 9, 24)[:, :6], weight, bias))
    assert "_Linear" in node_name(epigemm.linear_tanh(x, weight, bias))  # which may be written in place
    many = torch.randn(4096, 24)
    assert "_Linear" in node_name(call(many, weight, bias))
    assert "_Linear" in node_name(epigemm.linear_relu_div(x, weight, bias, 2.0))
    backends.mkldnn.matmul.fp32_precision = "bf16"
    assert "_Linear" in node_name(call(x, weight, bias, precision="highest"))


def test_a_checkpoint_saves_the_same_twice(rng: torch.Generator) -> None:
    """Whatever records the call by then: its hooks compare what both passes save."""
    x, weight, bias = drawn(rng, torch.device("cpu"), torch.float32)
    function: Any = epigemm.linear_relu
    result: Any = untyped_checkpoint(function, x, weight, bias, use_reentrant=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        backward(result.sum())
    eager = torch.relu(torch.nn.functional.linear(x, weight, bias))
    for tensor, expected in zip(
        (x, weight, bias), torch.autograd.grad(eager.sum(), [x, weight, bias]), strict=True
    ):
        assert tensor.grad is not None and torch.equal(tensor.grad, expected)


@pytest.mark.parametrize("learns", [False, True])
def test_functional_tensors_outside_of_a_mode(learns: bool) -> None:
    """Neither PyTorch's nodes nor ours see through them."""
    x, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    wrapped = [untyped._to_functional_tensor(t) for t in (x, weight.clone().requires_grad_(learns), bias)]
    untyped._enable_functionalization(reapply_views=True)
    try:
        result = ops.linear("relu_div", *wrapped, [], [2.0], "default")
        untyped._sync(result)
        plain = untyped._from_functional_tensor(result)
    finally:
        untyped._disable_functionalization()
    torch.testing.assert_close(plain.detach(), torch.relu(torch.nn.functional.linear(x, weight, bias)) / 2)
