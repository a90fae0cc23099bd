"""`fuse` is torch.compile with the backend: the same graphs and reports, sizes, and what is left alone."""

from __future__ import annotations

import copy
import gc
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
from tests.fusion.test_explainer import Breaks, Model
from tests.fusion.test_model import Block

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
    return nn.Sequential(*(Layer() for _ in range(12)))


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
    how: Callable[[nn.Module, dict[str, Any]], Any], model: nn.Module, x: Tensor
) -> tuple[Any, list[Any], list[FusionReport]]:
    """The model that `how` makes, its graphs, and their reports, for calls in several modes and sizes."""
    graphs: list[Any] = []
    reports: list[FusionReport] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        graphs.append(listed(graph_module.graph))
        return graph_module.forward

    torch.compiler.reset()
    made = how(model, {"backend": backend, "report": reports.append})
    for training, mode, rows in (
        (True, nullcontext(), 1),
        (False, torch.no_grad(), 1),
        (False, nullcontext(), 3),
    ):
        made.train(training)
        with mode:
            made(x.repeat(rows, 1))
    return made, graphs, [replace(report, seconds=0.0) for report in reports]


@pytest.mark.parametrize(
    ("make", "width"),
    [
        *((Block, 24), (Model, WIDTH), (Breaks, 8), (Named, WIDTH), (lambda: nn.Linear(8, 8), 8)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)), 8),
        (lambda: nn.Sequential(nn.LayerNorm(8), nn.ReLU()), 8),
    ],
)
def test_the_graphs_and_reports_of_torch_compile(make: Callable[[], nn.Module], width: int) -> None:
    model, x = make(), torch.randn(6, width)
    fused, graphs, reports = compiled(
        lambda module, options: epigemm.fuse(module, options=options), copy.deepcopy(model), x
    )
    _, expected, expected_reports = compiled(
        lambda module, options: torch.compile(module, backend="epigemm", options=options), model, x
    )
    assert graphs == expected and len(graphs) >= 3
    assert reports == expected_reports
    whole = FusionReport()
    for report in reports:
        whole.add(report)
    assert replace(report_of(fused), seconds=0.0) == whole


def test_names_of_layers() -> None:
    fused = fuse_eagerly(Named())
    fused(torch.randn(4, WIDTH))
    assert [site.name for site in report_of(fused).sites] == ["model.0", "self", "L.fn"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_model_without_a_product_is_compiled_all_the_same(backend: str) -> None:
    fused: Any = epigemm.fuse(nn.Sequential(nn.LayerNorm(8), nn.Tanh()), options={"backend": backend})
    x = torch.randn(4, 8)
    torch.testing.assert_close(fused(x), fused._call_impl(x), rtol=1e-5, atol=1e-5)
    assert str(report_of(fused)).startswith("0 of 0 products fused; compiled in ")


def frames(call: Any, x: Tensor) -> list[str]:
    """The Python functions that a call runs."""
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
    fused = frames(fuse_eagerly(model), x)
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


SIZES: list[tuple[str, Callable[[], nn.Module], Callable[[int], tuple[int, ...]]]] = [
    ("batches", Block, lambda n: (n, 24)),
    ("batches of sequences", Tokens, lambda n: (n, 5, WIDTH)),
    ("lengths", Tokens, lambda n: (3, n, WIDTH)),
    ("layers of one class", layers, lambda n: (n, WIDTH)),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("make", "shape"), [each[1:] for each in SIZES], ids=[each[0] for each in SIZES])
def test_sizes_and_modes(
    make: Callable[[], nn.Module], shape: Callable[[int], tuple[int, ...]], backend: str
) -> None:
    """20 sizes, each in training, in eval mode and without gradients: all calls are fused by a few compilations."""
    compilations: Counter[int | None] = Counter()
    inner = torch._dynamo.lookup_backend(backend)

    def counted(graph_module: fx.GraphModule, inputs: Any) -> Any:
        now = torch._guards.CompileContext.current_compile_id()
        assert now is not None
        compilations[now.frame_id] += 1
        return inner(graph_module, inputs)

    plain = make()
    fused: Any = epigemm.fuse(copy.deepcopy(plain), inplace=True, options={"backend": counted}, strict=True)
    for number, size in enumerate((5, 17, *range(2, 22))):
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
    assert not report_of(fused).notes
    assert max(compilations.values()) <= 4, compilations


class Modes(nn.Module):
    """Compiled again for each value of a string."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mode = nn.Linear(8, 8), ""

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.fc(x)) * len(self.mode)


@pytest.mark.parametrize("how", ["fuse", "torch.compile"])
def test_the_limit_of_dynamo_is_said(how: str) -> None:
    model, reports, x = Modes(), list[FusionReport](), torch.randn(3, 8)
    options: dict[str, Any] = {"backend": "eager", "report": reports.append}
    made: Any = (
        epigemm.fuse(model, inplace=True, options=options)
        if how == "fuse"
        else torch.compile(model, backend="epigemm", options=options)
    )
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


# --- what is left alone, and arguments --------------------------------------------------------------------------------


def test_a_compiled_model_keeps_its_call() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.compile(backend="eager")
    call = model._compiled_call_impl
    for _ in range(2):
        assert fuse_eagerly(model) is model and model._compiled_call_impl is call
        assert "compiled already" in str(report_of(model))
    assert epigemm.unfuse(model)._compiled_call_impl is call and not hasattr(model, "fusion_report")


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


class Gives(nn.Module):
    def forward(self, x: Tensor) -> Any:
        while True:
            yield x
            x = torch.relu(x)


def test_generators_are_left_alone() -> None:
    """Dynamo would run one to its end."""
    model = Gives()
    fused: Any = fuse_eagerly(model)
    assert fused is model and "its forward is a generator" in report_of(fused).notes[0]
    assert torch.equal(next(fused(x := torch.randn(3, 8))), x)


LEFT_ALONE: list[tuple[Callable[[], Any], str]] = [
    (scripted, "it is a RecursiveScriptModule"),
    (lambda: nn.Sequential(scripted(), nn.Linear(8, 8)), "its copy does not share parameters"),
    (lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), "it is a Sequential"),
    (lambda: torch.export.export(nn.Linear(8, 8), (torch.randn(3, 8),)).module(), "it is a GraphModule"),
    (lambda: nn.Sequential(nn.DataParallel(nn.Linear(8, 8))), "it holds a DataParallel"),
    (lambda: torch.compile(nn.Linear(8, 8), backend="eager"), "it has been compiled already"),
]


@pytest.mark.parametrize(("make", "reason"), LEFT_ALONE, ids=[each[1] for each in LEFT_ALONE])
def test_left_alone(make: Callable[[], Any], reason: str) -> None:
    model = make()
    fused = fuse_eagerly(model)
    assert fused is model and f"left alone: {reason}" in report_of(fused).notes[0]
    assert str(report_of(fused)).startswith("0 of 0 products fused")
    assert fused(torch.randn(3, 8)).shape == (3, 8)
    epigemm.unfuse(fused)
    assert not hasattr(fused, "fusion_report")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_weights_can_be_swapped(backend: str) -> None:
    """No weak reference to a parameter stays, as after torch.compile."""
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    fused: Any = epigemm.fuse(model, options={"backend": backend})
    fused(x)
    gc.collect()  # Inductor leaves some in cycles
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(8, 8)))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(fused(x), model.bias.expand(3, 8))


def test_what_torch_compile_takes_itself() -> None:
    """A filter of guards is no option of Inductor's."""
    seen: list[int] = []

    def keep(guards: Any) -> list[bool]:
        seen.append(len(guards))
        return [True] * len(guards)

    fused: Any = epigemm.fuse(nn.Linear(8, 8), options={"guard_filter_fn": keep, "backend": "eager"})
    fused(torch.randn(3, 8))
    assert seen


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cuda_graphs": True}, TypeError, "unexpected keyword argument 'cuda_graphs'"),
        ({"options": [1]}, TypeError, "options: got list"),
        ({"strict": True, "options": {"strict": False}}, ValueError, "strict: got True and options"),
        (
            {"keep_packs": True, "options": {"keep_packs": False}},
            ValueError,
            "keep_packs: got True and options",
        ),
        ({"options": {"strict": 1}}, TypeError, r"options\['strict'\]: got int; accepted is True or False"),
        ({"options": {"keep_packs": 1}}, TypeError, r"options\['keep_packs'\]: got int"),
        ({"options": {"report": 3}}, TypeError, r"options\['report'\]: got int; accepted is a callable"),
        (
            {"mode": "reduce-overhead", "options": {"backend": "eager"}},
            ValueError,
            "got mode for backend 'eager'",
        ),
        (
            {"options": {"backend": "eager", "epilogue_fusion": True}},
            ValueError,
            "got epilogue_fusion for backend",
        ),
        (
            {"options": {"backend": "eager", "mode": "max-autotune"}},
            ValueError,
            "got mode for backend 'eager'",
        ),
        ({"mode": "lite", "options": {"mode": "max-autotune"}}, ValueError, "mode: got 'lite' and options"),
        ({"mode": "fast"}, RuntimeError, "mode=fast"),
        ({"options": {"max_autotun": True}}, RuntimeError, "optimization option max_autotun"),
        ({"options": {"max_autotune": 3}}, RuntimeError, "max_autotune, got int should be bool"),
        ({"options": {"backend": "nobody"}}, RuntimeError, "nobody"),
    ],
)
@pytest.mark.parametrize("how", ["fuse", "dry run", "torch.compile"])
def test_wrong_arguments(how: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    """At once by `fuse`, at the first call by torch.compile, which takes no flags and either a mode or options."""
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    if how == "torch.compile":
        if len(settings) > 1 or not {"mode", "options"} & set(settings):
            return
        compiled: Any = torch.compile(model, backend="epigemm", **settings)
        with pytest.raises(Exception, match=message):
            compiled(x)
        return
    dry: dict[str, Any] = {"dry_run": True, "example_inputs": (x,)} if how == "dry run" else {}
    with pytest.raises(error, match=message):
        epigemm.fuse(model, **settings, **dry)
