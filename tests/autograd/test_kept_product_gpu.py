"""Recorded calls on a GPU whose kernel stores the product beside the result: gradients against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow
from epigemm.calls import one_kernel
from tests.support.watching import results_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

SHAPES = [(4096, 1024, 512), (1000, 520, 264), (16, 4096, 4096), (300, 2048, 1032)]


@epigemm.epilogue
def gated(acc: Tensor, bias: PerColumn, row: PerRow, gate: Matrix) -> Tensor:
    return F.silu(acc + bias) * gate * row


FUNCTIONS: dict[str, tuple[Any, int, Any]] = {
    # the function, how many operands it has, and its reference
    "gelu": (epigemm.linear_gelu, 1, lambda z, *_: F.gelu(z)),
    "silu": (epigemm.linear_silu, 1, lambda z, *_: F.silu(z)),
    "gated": (gated, 3, lambda z, row, gate: F.silu(z) * gate * row[:, None]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, count, reference = FUNCTIONS[name]
    m, n, k = size
    sizes = [(m, k), (n, k), (n,), (m,), (m, n)][: 2 + count]
    scales = [1.0, k**-0.5, 1.0, 1.0, 1.0]
    given = [
        (torch.randn(each, device="cuda") * scale).to(dtype).requires_grad_()
        for each, scale in zip(sizes, scales, strict=False)
    ]
    with results_of(one_kernel.both) as runs:
        result = function(*given)
    taken = [isinstance(each, tuple) for each in runs]
    explained = epigemm.explain(function, *given)  # which asks, too
    is_by_torch = "PyTorch's own operators record" in explained.reasons[0]
    assert taken == ([] if is_by_torch else ["stores the product" in explained.reasons[0]])
    grad = torch.randn(m, n, device="cuda").to(dtype)
    found = torch.autograd.grad(result, given, grad)
    wide = [each.detach().double().requires_grad_() for each in given]
    x, weight, bias, *others = wide
    expected = reference(F.linear(x, weight, bias), *others)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    tolerance = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-18}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(found, wanted, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert float(error) <= tolerance, tuple(one.shape)
