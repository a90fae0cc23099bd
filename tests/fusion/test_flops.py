"""What operators compute: PyTorch's formulas, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.fusion.effects import effects_of
from epigemm.fusion.flops import flops_of

grouped: Any = torch.ops.aten._grouped_mm.default


def test_grouped_products_have_a_formula() -> None:
    """Each row meets the matrix of its group alone, each column group the batch that it belongs to."""
    shapes = [
        ((10, 3), (4, 3, 5), 2 * 10 * 3 * 5),
        ((4, 6, 3), (3, 20), 2 * 6 * 3 * 20),
        ((6, 12), (12, 5), 2 * 6 * 12 * 5),
        ((4, 6, 3), (4, 3, 5), 2 * 4 * 6 * 3 * 5),
    ]
    for x, weight, expected in shapes:
        given = torch.empty(x, device="meta"), torch.empty(weight, device="meta")
        assert flops_of(grouped, given, {}, None) == expected
        named = dict(zip(("self", "mat2"), given, strict=True))
        assert flops_of(grouped, (), named, None) == expected


def test_what_has_no_formula_counts_for_nothing() -> None:
    x = torch.rand(6, 8)
    assert flops_of(torch.ops.aten.relu.default, (x,), {}, x) == 0
    assert flops_of(torch.ops.aten._flash_attention_forward.default, (x,), {}, x) == 0  # and one that fails


def graph_of(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> fx.Graph:
    found: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        found.append(graph_module.graph)
        return graph_module.forward

    compiled: Any = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled(*inputs)
    return found[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_nodes_operators_are_counted(dynamic: bool) -> None:
    def function(x: Tensor, weight: Tensor, image: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.linear(x, weight)
        return torch.bmm(y[None], y.t()[None]), F.conv2d(image, kernel), y.relu()

    inputs = torch.rand(6, 8), torch.rand(4, 8), torch.rand(1, 3, 9, 9), torch.rand(5, 3, 2, 2)
    graph = graph_of(function, *inputs, dynamic=dynamic)
    counted = {node.name: [each[1:] for each in effects_of(node).flops] for node in graph.nodes}
    assert counted["y"] == [(torch.float32, 2 * 6 * 8 * 4)]
    assert counted["bmm"] == [(torch.float32, 2 * 6 * 4 * 6)]
    assert counted["conv2d"] == [(torch.float32, 2 * 8 * 8 * 5 * 3 * 2 * 2)]
    assert counted["relu"] == []
