"""The pass over the graphs of `graphs`: equal values, types, strides, gradients, writes and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.fusion import FusionReport
from tests.fusion.graphs import GRAPHS, Graph
from tests.support.thorough import in_turn

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 4e-3}


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
        tolerance = TOLERANCE.get(other.dtype, 2e-4)
        finite = other[other.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() and not other.is_complex() else 1.0
        scale = max(1.0, largest)  # of a sum the rounding errors are those of its largest terms
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def has_chain(report: FusionReport) -> bool:
    return any(site.function != "linear" for site in report.sites)


BY_DYNAMO = [graph for graph in GRAPHS if "dynamo" in graph.roads]
OF_ANY_TYPE = [graph for graph in BY_DYNAMO if not graph.dtypes]


def test_there_are_enough_to_mean_something() -> None:
    found = [graph for graph in GRAPHS if graph.finds]
    assert len(found) > 30 and len(GRAPHS) - len(found) > 40
    assert len({graph.name for graph in GRAPHS}) == len(GRAPHS)


@pytest.mark.parametrize(
    ("graph", "backend"),
    in_turn(BY_DYNAMO, ["eager", "aot_eager"]),
    ids=str,
)
def test_by_dynamo(graph: Graph, backend: str) -> None:
    arguments = graph.arguments()
    fused, reports = by_dynamo(graph.function, backend)
    expected = outcome(graph.function, arguments)
    assert_same(outcome(fused, arguments), expected)
    dtypes = {argument.dtype for argument in arguments}
    left_alone = ("one_dimension", "no_columns", "checkpointed")
    if (
        expected != ["an error"]
        and graph.finds
        and dtypes == {torch.float32}
        and graph.name not in left_alone
    ):
        assert has_chain(reports[0]), reports[0]


@pytest.mark.parametrize(
    ("graph", "dtype"),
    in_turn(OF_ANY_TYPE, [torch.float64, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_other_types(graph: Graph, dtype: torch.dtype) -> None:
    torch.manual_seed(7)  # roundings of relus that nearly are zero
    arguments = [a.detach().to(dtype).requires_grad_(a.requires_grad) for a in graph.arguments()]
    fused, _ = by_dynamo(graph.function, "eager")
    assert_same(outcome(fused, arguments), outcome(graph.function, arguments))


@pytest.mark.parametrize("graph", [graph for graph in OF_ANY_TYPE if graph.finds], ids=str)
def test_second_derivatives(graph: Graph) -> None:
    """The gradient of a gradient's size."""
    arguments = graph.arguments()
    fused, _ = by_dynamo(graph.function, "eager")

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
