"""Which nodes of a graph are matrix products, of which operands, and why others are not fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from epigemm.fusion.matmuls import understand

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
