"""Rows in groups that autograd records: the product's derivatives, where calls take it, and what they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        result = epigemm.grouped_linear(*tensors, offs=offs(), epilogue="gelu")[:8]
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


def test_rows_of_experts_and_of_tokens() -> None:
    """Each is the other's derivative."""
    order = torch.randperm(12)
    routing = (order, order.argsort(), 3)
    for function, rows in ((group_products.by_expert, 4), (group_products.by_token_summed, 12)):
        x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            expected = function(x, *routing)
        torch.testing.assert_close(function(x, *routing), expected)
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, *routing), (x,))
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x, *routing), (x,))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of those that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_a_recorded_step_of_experts_copies() -> None:
    """One product for both halves of a weight; no rows are masked ahead of it, no gradient is padded or indexed."""
    layer = epigemm.nn.Experts(5, 32, 16, dtype=torch.bfloat16)
    x = torch.randn(9, 32).bfloat16().requires_grad_()
    shares = torch.rand(9, 2).bfloat16().requires_grad_()
    with Operators() as forward:
        result = layer(x, torch.stack([torch.randperm(5)[:2] for _ in range(9)]), shares)
    with Operators() as backward:
        result.float().sum().backward()
    assert forward.names.count("_grouped_mm") == 2 and "where" not in forward.names
    assert backward.names.count("_grouped_mm") == 4
    assert not {"slice_backward", "constant_pad_nd", "index_put", "_index_put_impl_"} & set(backward.names)
