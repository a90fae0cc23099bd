"""A pass that fails: the model runs as it was, the report and one warning say so, and `strict` raises it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import LoweringException, TritonMissing

import epigemm
from epigemm.fusion import FusionReport, rewrite
from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn

SAYS = "epigemm's pass failed"


class Planted(Exception):
    """Nothing that anybody else raises."""


def fails(*args: Any, **kwargs: Any) -> Any:
    raise Planted("on purpose\nand more")


def fails_after_the_first() -> Callable[..., Any]:
    """When the graph has been changed already."""
    done: list[int] = []
    replace = rewrite._replace

    def function(*args: Any, **named: Any) -> Any:
        if done:
            fails()
        done.append(1)
        return replace(*args, **named)

    return function


def breaks_the_graph(*args: Any, **kwargs: Any) -> tuple[fx.Graph, FusionReport]:
    """What lint finds: the first call is moved behind its readers."""
    graph, report = WORKING(*args, **kwargs)
    first = next(node for node in graph.nodes if node.op == "call_function")
    next(node for node in graph.nodes if node.op == "output").prepend(first)
    return graph, report


WORKING = rewrite.fuse_graph
PLANTED: list[tuple[Any, str, Callable[[], Any], type[Exception]]] = [
    (rewrite, "fuse_graph", lambda: fails, Planted),
    (rewrite, "_replace", fails_after_the_first, Planted),
    (rewrite, "fuse_graph", lambda: breaks_the_graph, RuntimeError),
]
names = "module, name, function, error"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x)))) - x * self.factor


@pytest.fixture(autouse=True)
def nobody_was_warned() -> None:
    rewrite.warn_once.cache_clear()


def run_quietly(call: Any, x: Tensor) -> tuple[Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call(x)
    return result, [str(each.message) for each in seen if SAYS in str(each.message)]


@pytest.mark.parametrize(names, PLANTED)
def test_fuse(
    module: Any, name: str, function: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, function())
    plain = Layers()
    fused: Any = fuse_eagerly(plain)
    x = torch.randn(3, 4)
    result, said = run_quietly(fused, x)
    torch.testing.assert_close(result, plain(x), rtol=0, atol=0)
    assert len(said) == 1 and error.__name__ in said[0]
    report = fused.fusion_report
    assert not report.sites and {SAYS in skipped.reason for skipped in report.skipped} == {True}, report
    assert f"{error.__name__}: " in str(report) and "and more" not in str(report)
    again, said = run_quietly(fuse_eagerly(Layers()), x.double().float())
    assert not said and again.shape == result.shape


@pytest.mark.parametrize(names, PLANTED)
def test_strict_fuse(
    module: Any, name: str, function: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, function())
    fused: Any = fuse_eagerly(Layers(), strict=True)
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed, match=f"{SAYS} on a graph: {error.__name__}: ") as caught:
            fused(torch.randn(3, 4))
        assert type(caught.value.inner_exception.__cause__) is error
    with pytest.raises(RuntimeError, match=SAYS):
        fuse_eagerly(Layers(), strict=True, dry_run=True, example_inputs=(torch.randn(3, 4),))


@pytest.mark.parametrize(names, PLANTED)
def test_backend(
    module: Any, name: str, function: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        graph_module.graph.lint()
        seen.append(graph_module.code)
        return graph_module.forward

    plain, reports, x = Layers(), list[FusionReport](), torch.randn(3, 4)
    torch.compile(plain, backend=backend)(x)
    monkeypatch.setattr(module, name, function())
    options: dict[str, Any] = {"backend": backend, "report": reports.append}
    result, said = run_quietly(torch.compile(plain, backend="epigemm", options=options), x)
    assert torch.equal(result, plain(x)) and len(said) == 1 and error.__name__ in said[0]
    assert seen[0] == seen[1], "the graph is as it was"
    assert [SAYS in skipped.reason for skipped in reports[0].skipped] == [True] and not reports[0].sites

    for compiler in ("aot_eager", "inductor"):  # which read what Dynamo has noted at the graph's inputs
        torch.compiler.reset()
        compiled = torch.compile(plain, backend="epigemm", options={"backend": compiler})
        torch.testing.assert_close(run_quietly(compiled, x)[0], plain(x))

    strict = torch.compile(plain, backend="epigemm", options={**options, "strict": True})
    with pytest.raises(Exception, match=f"{SAYS} on a graph: {error.__name__}: ") as caught:
        strict(x)
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, RuntimeError) and type(inner.__cause__) is error


def test_what_works_is_not_changed_by_strict() -> None:
    plain, x = Layers(), torch.randn(3, 4)
    fused: Any = fuse_eagerly(plain, strict=True)
    torch.testing.assert_close(fused(x), plain(x))
    assert len(fused.fusion_report.sites) == 2 and not fused.fusion_report.skipped


class Counts(Layers):
    """Writes a buffer, and needs gradients."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) + self.calls


def raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


def lowering(error: Exception) -> Any:
    """`error` when Inductor has lowered a graph."""
    return patch.object(torch._inductor.graph.GraphLowering, "compile_to_module", raises(error))


INDUCTOR_FAILS: dict[str, tuple[Callable[[], Any], str]] = {
    "no compiler": (
        lambda: torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        "No working C.. compiler",
    ),
    "no Triton": (lambda: lowering(TritonMissing(None)), "Cannot find a working triton"),
    "its own error": (
        lambda: lowering(LoweringException(Planted("on purpose"), print, [], {})),
        "Planted: on purpose",
    ),
    "a worker that dies": (
        lambda: lowering(BrokenProcessPool("a worker died")),
        "BrokenProcessPool: a worker died",
    ),
    "early": (
        lambda: patch.object(torch._inductor.compile_fx, "compile_fx", raises(Planted("on purpose"))),
        "Planted: on purpose",
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("what", "by"), in_turn([*INDUCTOR_FAILS], ["fuse", "torch.compile"]))
def test_inductor_fails(what: str, by: str, strict: bool) -> None:
    """The graph runs operator by operator, one warning and the report say so, and `strict` raises it."""
    failing, says = INDUCTOR_FAILS[what]
    plain, reports = Counts(), list[FusionReport]()
    options: dict[str, Any] = {"report": reports.append, "strict": strict}
    model = copy.deepcopy(plain)
    made: Any = (
        epigemm.fuse(model, inplace=True, options=options)
        if by == "fuse"
        else torch.compile(model, backend="epigemm", options=options)
    )
    with (
        torch._inductor.config.patch({"force_disable_caches": True}),
        failing(),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        if strict:
            with pytest.raises(Exception, match=says):
                made(torch.randn(3, 4))
            assert not model.calls and not reports
            return
        for rows in (3, 5, 7):
            x = torch.randn(rows, 4, requires_grad=True)
            results = made(x), plain(x)
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x) for each in results))
    (said,) = [str(each.message) for each in seen if "Inductor" in str(each.message)]
    assert re.search(f"Inductor failed on it, and it runs operator by operator: .*{says}", said)
    assert len(reports) == 2 and all(len(report.sites) == 2 and not report.skipped for report in reports)
    assert all(re.search(says, str(report)) for report in reports)


def test_a_flag() -> None:
    with pytest.raises(TypeError, match="strict: got int; accepted is True or False"):
        fuse_eagerly(Layers(), strict=1)
