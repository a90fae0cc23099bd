"""`fuse` is torch.compile with the backend: the same graphs and reports, sizes, modes, parts, and Dynamo's limit."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import epigemm
from epigemm.fusion import FusionReport, rewrite
from tests.fusion.eager import assert_all_fused, fuse_eagerly, report_of
from tests.fusion.test_model import Block, assert_same
from tests.fusion.test_report import Model

WIDTH = 16


class Named(nn.Module):
    """Layers with names that a trace has for other things."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.self = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.L = nn.ModuleDict({"fn": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.L["fn"](torch.relu(self.self(torch.relu(self.model(x))))))


class Layer(nn.Module):
    """A frame of its own: its graph breaks, and each layer has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.fc1(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.fc2(h)) + x


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(9)))  # one more than Dynamo compiles versions of a function


# --- the same as torch.compile ----------------------------------------------------------------------------------------


def listed(graph: fx.Graph) -> list[tuple[str, str, str]]:
    """A graph without the names of its nodes."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        target = getattr(node.target, "__name__", node.target) if node.op[:4] == "call" else ""
        found.append((node.op, str(target), str(fx.map_arg((node.args, node.kwargs), numbers.__getitem__))))
    return found


def compiled(
    how: Callable[..., Any], model: nn.Module, x: Tensor
) -> tuple[Any, list[Any], list[FusionReport]]:
    """The model that `how` makes, its graphs, and their reports, for calls in several modes and sizes."""
    graphs: list[Any] = []
    reports: list[FusionReport] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        graphs.append(listed(graph_module.graph))
        return graph_module.forward

    torch.compiler.reset()
    made = how(model, options={"backend": backend, "report": reports.append})
    ways: list[tuple[bool, Any, int]] = [
        (True, nullcontext(), 1),
        (False, torch.no_grad(), 1),
        (False, nullcontext(), 3),
    ]
    for training, mode, rows in ways:
        made.train(training)
        with mode:
            made(x.repeat(rows, 1))
    return made, graphs, [replace(report, seconds=0.0) for report in reports]


@pytest.mark.parametrize(
    ("make", "width"),
    [(Block, 24), (Model, WIDTH), (Layer, WIDTH), (Named, WIDTH), (lambda: nn.LayerNorm(8), 8)],
)
def test_the_graphs_and_reports_of_torch_compile(make: Callable[[], nn.Module], width: int) -> None:
    model, x = make(), torch.randn(6, width)
    fused, graphs, reports = compiled(epigemm.fuse, copy.deepcopy(model), x)
    _, *expected = compiled(
        lambda module, **given: torch.compile(module, backend="epigemm", **given), model, x
    )
    assert [graphs, reports] == expected and len(graphs) >= 3
    whole = FusionReport()
    for report in reports:
        whole.add(report)
    assert replace(report_of(fused), seconds=0.0) == whole
    if make is Named:
        assert [site.name for site in whole.sites] == ["model.0", "self", "L.fn"]


def frames(call: Any, x: Tensor) -> list[str]:
    """The files of the Python functions that a call runs."""
    for _ in range(2):
        call(x)
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call(x)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.LayerNorm(8), nn.Tanh()), lambda: nn.BatchNorm1d(8)]
)
def test_without_a_fused_call_it_runs_what_torch_runs(make: Callable[[], nn.Module]) -> None:
    """With "eager" inside: no function more than `torch.compile(model, backend="eager")`, one of them epigemm's."""
    model, x = make(), torch.randn(4, 8)
    fused = frames(made := fuse_eagerly(model), x)
    assert str(report_of(made)).startswith("0 of 0 products fused; compiled in ")
    torch.compiler.reset()
    assert len(fused) <= len(frames(torch.compile(model, backend="eager"), x))
    assert sum("epigemm" in file for file in fused) == 1
    torch.compiler.reset()
    options: dict[str, Any] = {"backend": "eager"}
    backend = frames(torch.compile(model, backend="epigemm", options=options), x)
    assert not any("epigemm" in file for file in backend)


# --- sizes and modes --------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A transformer's layer, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = x + self.positions[: x.shape[1]]
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("make", "shape", "backend"),
    [
        (Block, lambda n: (n, 24), "aot_eager"),
        (Tokens, lambda n: (n, 5, WIDTH), "eager"),
        (Tokens, lambda n: (3, n, WIDTH), "aot_eager"),
        (layers, lambda n: (n, WIDTH), "eager"),
    ],
    ids=["batches", "batches of sequences", "lengths", "layers of one class"],
)
def test_sizes_and_modes(make: Callable[[], nn.Module], shape: Callable[[int], Any], backend: str) -> None:
    """Ten sizes, in training, in eval mode and without gradients: all calls are fused by a few compilations."""
    compilations: Counter[int | None] = Counter()
    inner = torch._dynamo.lookup_backend(backend)

    def counted(graph_module: fx.GraphModule, inputs: Any) -> Any:
        now = torch._guards.CompileContext.current_compile_id()
        assert now is not None
        compilations[now.frame_id] += 1
        return inner(graph_module, inputs)

    plain = make()
    fused: Any = epigemm.fuse(copy.deepcopy(plain), inplace=True, options={"backend": counted}, strict=True)
    for number, size in enumerate((5, 17, *range(2, 10))):
        for module in (plain, fused):
            module.train(number % 3 == 0)
        x = torch.randn(shape(size), requires_grad=True)
        with torch.no_grad() if number % 3 == 2 else nullcontext():
            results = []
            for module in (plain, fused):
                torch.manual_seed(size)
                results.append(module(x))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        if number % 3 != 2:
            gradients = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert_all_fused(fused)
    assert not report_of(fused).notes and max(compilations.values()) <= 4, compilations


class Modes(nn.Module):
    """Compiled again for each value of a string."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mode = nn.Linear(8, 8), ""

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.fc(x)) * len(self.mode)


def test_the_limit_of_dynamo_is_said() -> None:
    model, reports, x = Modes(), list[FusionReport](), torch.randn(3, 8)
    made: Any = epigemm.fuse(model, inplace=True, options={"backend": "eager", "report": reports.append})
    rewrite.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for mode in range(6):
            model.mode = "a" * mode
            with torch.compiler.config.patch(recompile_limit=4):  # type: ignore[attr-defined]
                torch.testing.assert_close(made(x), model._call_impl(x))  # type: ignore[no-untyped-call]
    said = [str(each.message) for each in seen if "its limit" in str(each.message)]
    assert len(said) == 1 and "compiled a function 4 times" in said[0]
    assert ["its limit" in str(report) for report in reports] == [False, False, False, True]


# --- fused and compiled parts -----------------------------------------------------------------------------------------


def test_a_fused_model_is_compiled_and_watched() -> None:
    """Within torch.compile, whole or by regions: more than torch.compile compiles versions of one function."""
    x, plain = torch.randn(9, 24), nn.Sequential(*(Block().eval() for _ in range(3)))
    fused = fuse_eagerly(plain)
    regions: list[Any] = [torch.compile(each, backend="aot_eager", fullgraph=True) for each in fused]
    whole: Any = torch.compile(fused[:2], backend="epigemm", options={"backend": "aot_eager"})
    with torch.compiler.config.patch(recompile_limit=2):  # type: ignore[attr-defined]
        for factor in (2.0, 3.0):
            for module in (*plain, *fused):
                module.factor = factor
            for region, block in zip(regions, plain, strict=True):
                assert_same(region, block, x)
            assert_same(whole, plain[:2], x)
