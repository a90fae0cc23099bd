"""Recorded calls that one kernel computes with the product beside the result."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from tests.support.formulas import formula
from tests.support.pieces import DEVICE
from tests.support.pretended import H200, Pretended, pretend_gpu

M, N, K = 2048, 1024, 256


by_two = functools.partial(epigemm.linear_relu_div, divisor=2.0)
soft = epigemm.epilogue(formula("acc, bias: PerColumn -> F.softplus(acc + bias)"))
gated = epigemm.epilogue(formula("acc, bias: PerColumn, gate: Matrix -> F.silu(acc + bias) * gate"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """CPU tensors count as lying on an H200."""
    made = Pretended()
    pretend_gpu(monkeypatch, DEVICE, made, gpu=H200)
    return made


def tensors(dtype: torch.dtype, rng: torch.Generator) -> list[Tensor]:
    sizes = ((M, K), (N, K), (N,), (M, N))
    return [torch.randn(size, generator=rng).to(dtype).requires_grad_() for size in sizes]


FUNCTIONS: dict[str, tuple[Any, int, Any]] = {
    # the function, how many operands it has, and its reference
    "softplus": (soft, 1, lambda z: F.softplus(z)),
    "quotient": (by_two, 0, lambda z: F.relu(z) / 2),
    "gate": (gated, 2, lambda z, gate: F.silu(z) * gate),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_read_the_product_that_was_stored(
    name: str, dtype: torch.dtype, rng: torch.Generator, gpu: Pretended
) -> None:
    function, count, reference = FUNCTIONS[name]
    given = tensors(dtype, rng)[: 2 + count]
    result = function(*given)
    assert gpu.stores == len(gpu.ran) == 1, "no second kernel"
    grad = torch.randn(result.shape, generator=rng).to(dtype)
    found = torch.autograd.grad(result, given, grad)
    wide = [each.detach().double().requires_grad_() for each in given]
    exact = reference(F.linear(*wide[:3]), *wide[3:])
    wanted = torch.autograd.grad(exact, wide, grad.double())
    tolerance = 2.0**-6 if dtype is torch.bfloat16 else 2.0**-18
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).norm() / other.norm()) <= tolerance, tuple(one.shape)


def test_what_runs_apart(rng: torch.Generator, gpu: Pretended) -> None:
    """A ReLU's derivative reads its result, and without gradients nothing is kept."""
    x, weight, bias, _ = tensors(torch.float32, rng)
    epigemm.linear_relu(x, weight, bias)
    epigemm.linear(x, weight, bias)
    with torch.no_grad():
        epigemm.linear_gelu(x, weight, bias)
    assert gpu.ran and not gpu.stores


def test_explain(gpu: Pretended) -> None:
    """One kernel, and the derivative reads what it has stored."""
    x, weight = torch.empty(4096, 1024, dtype=torch.bfloat16), torch.empty(2048, 1024, dtype=torch.bfloat16)
    found = epigemm.explain("linear_gelu", x, weight.requires_grad_())
    (kernel,) = found.kernels
    assert found.path == "fused" and "bias_gelu_with_product." in kernel
    assert "stores the product" in found.reasons[0] and "on the saved product" in found.backward
