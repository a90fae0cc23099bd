"""Recorded calls that one kernel computes with the product beside the result."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm.autograd import nodes
from epigemm.calls import one_kernel
from tests.support.formulas import formula
from tests.support.pretended import describe

M, N, K = 6, 8, 16


by_two = functools.partial(epigemm.linear_relu_div, divisor=2.0)
soft = epigemm.epilogue(formula("acc, bias: PerColumn -> F.softplus(acc + bias)"))
gated = epigemm.epilogue(formula("acc, bias: PerColumn, gate: Matrix -> F.silu(acc + bias) * gate"))


class Kernel:
    """In place of the entry's kernel: both values, in fp32."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(one_kernel, "both", self)
        monkeypatch.setattr(nodes, "forward", self.refuse)

    def __call__(self, call: Any, *, is_recorded: bool) -> tuple[Tensor, Tensor]:
        assert is_recorded and not torch.is_grad_enabled()
        self.count += 1
        acc = call.x.float() @ call.weight.float().t()
        wide = [each.float() if isinstance(each, Tensor) else each for each in call.operands]
        assert call.epilogue.traced.stored.steps
        stored = acc if call.bias is None else acc + call.bias
        return (call.epilogue.reference(acc, wide).to(call.x.dtype), stored.to(call.x.dtype))

    def refuse(self, *_: Any) -> Tensor:
        raise AssertionError("a second kernel")


def tensors(dtype: torch.dtype, rng: torch.Generator) -> list[Tensor]:
    sizes = ((M, K), (N, K), (N,), (M, N))
    return [torch.randn(size, generator=rng).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_read_the_product_that_was_stored(
    dtype: torch.dtype, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, gate = tensors(dtype, rng)
    kernel = Kernel(monkeypatch)
    functions: list[tuple[Any, list[Tensor], Any]] = [
        (soft, [x, weight, bias], lambda a, w, b: F.softplus(F.linear(a, w, b))),
        (by_two, [x, weight], lambda a, w: F.relu(F.linear(a, w)) / 2),
        (gated, [x, weight, bias, gate], lambda a, w, b, g: F.silu(F.linear(a, w, b)) * g),
    ]
    for number, (function, given, reference) in enumerate(functions, 1):
        result = function(*given)
        assert kernel.count == number
        grad = torch.randn(result.shape, generator=rng).to(dtype)
        found = torch.autograd.grad(result, given, grad)
        wide = [each.detach().double().requires_grad_() for each in given]
        wanted = torch.autograd.grad(reference(*wide), wide, grad.double())
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * 4)


def test_what_runs_apart(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ReLU's derivative reads its result, and without gradients nothing is kept."""
    x, weight, bias, _ = tensors(torch.float32, rng)
    kernel = Kernel(monkeypatch)
    epigemm.linear_relu(x, weight, bias)
    epigemm.linear(x, weight, bias)
    with torch.no_grad():
        epigemm.linear_gelu(x, weight, bias)
    assert kernel.count == 0


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200: one kernel, and the derivative reads what it has stored."""
    describe(monkeypatch, kernels=True, linked=True)
    x, weight = torch.empty(4096, 1024, dtype=torch.bfloat16), torch.empty(2048, 1024, dtype=torch.bfloat16)
    found = epigemm.explain("linear_gelu", x, weight.requires_grad_())
    (kernel,) = found.kernels
    assert found.path == "fused" and "bias_gelu_with_product." in kernel
    assert "stores the product" in found.reasons[0] and "on the saved product" in found.backward
