"""The pass over the graphs of `graphs`: equal values, types, strides, gradients, writes and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from epigemm.fusion import FusionReport
from epigemm.fusion.dynamo import GraphValues
from epigemm.fusion.rewrite import fuse_graph
from tests.fusion.graphs import GRAPHS, Graph

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 4e-3}


class _Shapes(fx.Interpreter):
    """Runs a graph and notes each node's tensor, as Dynamo does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def by_fx(function: Callable[..., Any], arguments: list[Tensor]) -> tuple[Callable[..., Any], FusionReport]:
    """The function, traced by torch.fx and fused."""
    graph_module = fx.symbolic_trace(function)
    # The nodes before an error have their values.
    with torch.no_grad(), contextlib.suppress(Exception):
        _Shapes(graph_module).run(*(a.detach().clone() for a in arguments))
    report = fuse_graph(graph_module.graph, GraphValues(graph_module))
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module, report


def by_dynamo(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], list[FusionReport]]:
    """The function, compiled; the reports come with the first call."""
    torch._dynamo.reset()
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"report": reports.append, "backend": backend}
    return torch.compile(function, backend="epigemm", fullgraph=True, options=options), reports


def outcome(function: Callable[..., Any], arguments: list[Tensor]) -> list[Any]:
    """What a call gives and leaves behind: results, their layout, the arguments, gradients; or the errors."""
    given = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    torch.manual_seed(1)
    try:
        results = function(*given)
    except Exception:
        return ["an error"]
    outputs: list[Tensor] = [*results] if isinstance(results, tuple) else [results]
    seen: list[Any] = []
    for output in outputs:
        seen += [output.dtype, output.shape, output.stride(), output.requires_grad, output.detach()]
    seen += [argument.detach() for argument in given]
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return seen
    generator = torch.Generator().manual_seed(2)
    upstream = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in differentiable
    ]
    wanted = [argument for argument in given if argument.requires_grad]
    try:
        found = torch.autograd.grad(differentiable, wanted, upstream, allow_unused=True)
    except RuntimeError:
        return [*seen, "an error in backward"]
    return [*seen, *found]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected), (actual, expected)
    for mine, other in zip(actual, expected, strict=True):
        if not isinstance(other, Tensor):
            assert type(mine) is type(other) and mine == other
            continue
        tolerance = TOLERANCE.get(other.dtype, 1e-4)
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def functions(report: FusionReport) -> tuple[str, ...]:
    return tuple(site.function for site in report.sites if site.function != "linear")


def on(road: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("graph", [graph for graph in GRAPHS if road in graph.roads], ids=str)


def test_there_are_enough_to_mean_something() -> None:
    found = [graph for graph in GRAPHS if graph.finds]
    assert len(found) > 40 and len(GRAPHS) - len(found) > 40
    assert len({graph.name for graph in GRAPHS}) == len(GRAPHS)


@on("fx")
def test_by_fx(graph: Graph) -> None:
    arguments = graph.arguments()
    fused, report = by_fx(graph.function, arguments)
    assert functions(report) == graph.finds
    assert_same(outcome(fused, arguments), outcome(graph.function, arguments))


@on("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_by_dynamo(graph: Graph, backend: str) -> None:
    arguments = graph.arguments()
    fused, reports = by_dynamo(graph.function, backend)
    expected = outcome(graph.function, arguments)
    assert_same(outcome(fused, arguments), expected)
    if expected != ["an error"]:
        assert functions(reports[0]) == graph.finds


@on("fx")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types(graph: Graph, dtype: torch.dtype) -> None:
    if graph.dtypes:
        pytest.skip("has types of its own")
    torch.manual_seed(7)  # roundings of relus that nearly are zero
    arguments = [a.detach().to(dtype).requires_grad_(a.requires_grad) for a in graph.arguments()]
    fused, _ = by_fx(graph.function, arguments)
    assert_same(outcome(fused, arguments), outcome(graph.function, arguments))


@on("fx")
def test_second_derivatives(graph: Graph) -> None:
    """The gradient of a gradient's size."""
    if not graph.finds or graph.dtypes or "error" in graph.name:
        pytest.skip("nothing is fused there")
    arguments = [a.detach().double().requires_grad_(a.requires_grad) for a in graph.arguments()]
    fused, _ = by_fx(graph.function, arguments)

    def size_of_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*given: Tensor) -> Tensor:
            results = function(*given)
            output = results[0] if isinstance(results, tuple) else results
            wanted = [argument for argument in given if argument.requires_grad]
            found = torch.autograd.grad(output.sin().sum(), wanted, create_graph=True, allow_unused=True)
            return torch.stack([g.square().sum() for g in found if g is not None]).sum()

        return compute

    assert_same(
        outcome(size_of_gradient(fused), arguments), outcome(size_of_gradient(graph.function), arguments)
    )
