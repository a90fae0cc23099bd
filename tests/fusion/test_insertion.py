"""What a function calls becomes nodes of a graph, which compute what the function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from epigemm.fusion.insertion import Inserter, Left


def run(function: Callable[..., Any], *inputs: Tensor, learns: bool = False, dynamic: bool = False) -> Any:
    """What a graph that returns the sum of its inputs gives with a function of them in place of its results."""
    made: list[fx.Node] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph = graph_module.graph
        output = next(reversed(graph.nodes))
        (summed,) = [node for node in graph.nodes if node.op == "call_function"]
        inserter = Inserter(summed)
        found = inserter.run(function, summed.args, learns=learns)
        made.extend(inserter.made)
        output.args = (tuple(each for each in found if each is not None),)
        for node in inserter.made:
            value = node.meta["example_value"]
            if isinstance(value, Tensor):
                assert value.requires_grad <= learns
                assert node.meta["stack_trace"] == summed.meta["stack_trace"]
        graph.lint()
        graph_module.recompile()
        return graph_module.forward

    torch._dynamo.reset()
    result = torch.compile(lambda a, b: a + b, backend=backend, dynamic=dynamic)(*inputs)
    return result, [node.op for node in made]


def test_functions_methods_and_several_results() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        first, second = torch.chunk(a, 2, -1)
        return torch.relu(first), None, second.permute((1, 0)) * b[0, 0]

    a, b = torch.randn(4, 6), torch.randn(4, 6)
    found, ops = run(function, a, b)
    assert found is not None and set(ops) == {"call_function", "call_method"}
    assert torch.equal(found, torch.relu(a[:, :3]))


def test_a_size_is_computed_from_the_graphs_symbols() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.reshape(a.shape[0] * a.shape[1] // 2, 2)

    a, b = torch.randn(4, 6), torch.randn(4, 6)
    found, _ = run(function, a, b, dynamic=True)
    assert torch.equal(found, a.reshape(12, 2))


def test_with_gradients() -> None:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    found, _ = run(lambda a, b: torch.tanh(a) * b, a, b, learns=True)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), a)[0], b * (1 - torch.tanh(a) ** 2))


def test_a_tensor_that_is_not_plain_is_refused() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = torch.randn(3).to_sparse()
    with pytest.raises(Left, match="an argument is no plain tensor"):
        Inserter(graph.output(node)).run(torch.relu, (node,), learns=False)
