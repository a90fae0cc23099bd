"""Which nodes of a graph are matrix products, of which operands, and why others are not fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.fusion.matmuls import Product, understand

x, weight, bias = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)


def understood(function: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """What each node is, but for those that multiply nothing."""
    found: list[Any] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        found.extend(understand(node) for node in graph_module.graph.nodes)
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return [each for each in found if each is not None]


PRODUCTS: dict[str, tuple[Callable[..., Any], bool, bool]] = {  # whether there is a bias, and [K, N]
    "linear": (lambda x, w, b: F.linear(x, w, b), True, False),
    "linear without a bias": (lambda x, w, b: F.linear(x, w) + b, False, False),
    "@": (lambda x, w, b: x @ w.t(), False, False),
    "@ by [K, N]": (lambda x, w, b: x @ w.t().contiguous(), False, True),
    "matmul": (lambda x, w, b: torch.matmul(x, w.t()), False, False),
    "mm": (lambda x, w, b: x.mm(w.t()), False, False),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.t()), True, False),
    "addmm with factors": (lambda x, w, b: torch.addmm(b, x, w.t(), beta=2, alpha=0.5), True, False),
    "addmm by names": (lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.t()), True, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    function, has_bias, is_kn = PRODUCTS[name]
    (product,) = understood(function, x, weight, bias)
    assert isinstance(product, Product)
    assert (product.bias is not None, product.is_kn, product.is_batch) == (has_bias, is_kn, False)
    shapes = [tuple(node.meta["example_value"].shape) for node in (product.x, product.weight)]
    assert shapes == [(6, 8), (8, 4) if is_kn else (4, 8)]
    assert product.value.shape == (6, 4)
    if has_bias:
        assert product.bias is not None and product.bias.meta["example_value"].shape == (4,)


def test_a_batch_of_one_weight() -> None:
    def batch(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.view(2, 3, 8), w.t().expand(2, 8, 4))

    (product,) = understood(batch, x, weight)
    assert isinstance(product, Product) and product.is_batch and product.is_kn


NO_FACTOR = "its alpha or beta is 0, or no number"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "beta 0": (lambda x, w, b: torch.addmm(b, x, w.t(), beta=0), NO_FACTOR),
    "alpha 0": (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=0.0), NO_FACTOR),
    "fp64": (lambda x, w, b: x.double() @ w.double().t(), "it is in float64"),
    "integers": (lambda x, w, b: x.long() @ w.long().t(), "it is in int64"),
    "out=": (lambda x, w, b: torch.mm(x, w.t(), out=torch.empty(6, 4)), "it is written to out="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, reason = REFUSED[name]
    assert understood(function, x, weight, bias) == [reason]


def test_what_is_no_product_of_a_weight() -> None:
    batches = torch.randn(2, 3, 8), torch.randn(2, 8, 4)
    assert understood(lambda a, b: torch.bmm(a, b), *batches) == []
    assert understood(lambda x, w: x * w[0], x, weight) == []
    assert understood(lambda x, w: x[0] @ w.t(), x, weight) == []
