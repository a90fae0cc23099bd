"""The product of rows in groups that autograd records: its node's derivatives, and where calls take it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.autograd import group_products
from epigemm.planner import plans
from tests.test_groups import K, N, draw, offs


def test_the_recorded_product_of_kernels() -> None:
    """Its derivatives, and those of these, where the calls that it makes are PyTorch's."""
    x, weight, _ = draw(torch.float64, 6, 5)
    x, weight = x[:8].requires_grad_(), weight.requires_grad_()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return group_products.recorded(x, weight, offs())

    assert torch.autograd.gradcheck(product, (x, weight))
    assert torch.autograd.gradgradcheck(product, (x, weight))


def test_several_gradients_at_once_of_the_recorded_product() -> None:
    """`is_grads_batched`: what comes is no memory that a kernel could read."""
    x, weight, _ = draw(torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    result = group_products.recorded(x, weight, offs())[:8]
    upstream = torch.randn(3, *result.shape)
    found = torch.autograd.grad(result, leaves, upstream, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(result, leaves, one, retain_graph=True) for one in upstream]
    for got, expected in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(got[:, :8], torch.stack(expected)[:, :8])  # no rows behind the groups


@pytest.mark.parametrize("sizes", [(N, K), (17, 33)], ids=str)
def test_gradients_where_kernels_are(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    """The same as where there are none; rows behind the groups have none."""
    tensors = [each.requires_grad_() for each in draw(torch.float32, *sizes)]

    def gradients() -> tuple[Tensor, ...]:
        result = epigemm.grouped_linear(*tensors, offs=offs(), epilogue="gelu")
        return result, *torch.autograd.grad(result.square().sum(), tensors)

    expected, taken = gradients(), list[Tensor]()
    recorded = group_products.recorded

    def watched(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        taken.append(x)
        return recorded(x, weight, ends)

    monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: True)
    monkeypatch.setattr(group_products, "recorded", watched)
    found = gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(taken) == 2 and not bool(found[1][8:].any())  # the call's product, and that of x's gradient
