"""A pass that fails: the model runs as it was, the report and one warning say so, and `strict` raises it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import epigemm
from epigemm.fusion import FusionReport, changes, model_call, rewrite

SAYS = "epigemm's pass failed"


class Planted(Exception):
    """Nothing that anybody else raises."""


def fails(*args: Any, **kwargs: Any) -> Any:
    raise Planted("on purpose\nand more")


def fails_after_the_first() -> Callable[..., Any]:
    """When the graph has been changed already."""
    done: list[int] = []
    replace = rewrite._replace

    def function(*args: Any) -> Any:
        if done:
            fails()
        done.append(1)
        return replace(*args)

    return function


def breaks_the_graph(graph: fx.Graph, *args: Any, **kwargs: Any) -> FusionReport:
    """What lint finds: the first call is moved behind its readers."""
    report = WORKING(graph, *args, **kwargs)
    first = next(node for node in graph.nodes if node.op == "call_function")
    next(node for node in graph.nodes if node.op == "output").prepend(first)
    return report


WORKING = rewrite.fuse_graph
PLANTED: list[tuple[Any, str, Callable[[], Any], type[Exception]]] = [
    (rewrite, "fuse_graph", lambda: fails, Planted),
    (rewrite, "_replace", fails_after_the_first, Planted),
    (rewrite, "fuse_graph", lambda: breaks_the_graph, RuntimeError),
]
IN_FUSE_ALONE: list[tuple[Any, str, Callable[[], Any], type[Exception]]] = [
    (model_call, "guard_more", lambda: fails, Planted),
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


@pytest.mark.parametrize(names, [*PLANTED, *IN_FUSE_ALONE])
def test_fuse(
    module: Any, name: str, function: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, function())
    plain = Layers()
    fused: Any = epigemm.fuse(plain)
    x = torch.randn(3, 4)
    result, said = run_quietly(fused, x)
    torch.testing.assert_close(result, plain(x), rtol=0, atol=0)
    assert len(said) == 1 and error.__name__ in said[0]
    report = fused.fusion_report
    assert not report.sites and {SAYS in skipped.reason for skipped in report.skipped} == {True}, report
    assert f"{error.__name__}: " in str(report) and "and more" not in str(report)
    again, said = run_quietly(epigemm.fuse(Layers()), x.double().float())
    assert not said and again.shape == result.shape
    with epigemm.fusion.watch() as unfused:
        fused(x)
    assert name == "guard_more" or any(SAYS in reason for _, reason in unfused)


@pytest.mark.parametrize(names, [*PLANTED, *IN_FUSE_ALONE])
def test_strict_fuse(
    module: Any, name: str, function: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, function())
    fused: Any = epigemm.fuse(Layers(), strict=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{SAYS} on a graph: {error.__name__}: ") as caught:
            fused(torch.randn(3, 4))
        assert type(caught.value.__cause__) is error
    with pytest.raises(RuntimeError, match=SAYS):
        epigemm.fuse(Layers(), strict=True, dry_run=True, example_inputs=(torch.randn(3, 4),))


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
    fused: Any = epigemm.fuse(plain, strict=True)
    torch.testing.assert_close(fused(x), plain(x))
    assert len(fused.fusion_report.sites) == 2 and not fused.fusion_report.skipped


def test_what_dynamo_cannot_compile_is_a_note() -> None:
    """An error of the model's is the model's, also where it is strict."""

    class Raises(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ x.new_ones(5, 5)  # type: ignore[no-any-return]

    fused: Any = epigemm.fuse(Raises(), strict=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fused(torch.randn(3, 4))
    assert any("Dynamo could not compile a part of it: " in note for note in fused.fusion_report.notes)


@pytest.mark.parametrize("strict", [False, True])
def test_guards_that_cannot_be_made(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo throws the graph away then: the report does not count what was fused in it."""
    monkeypatch.setattr(changes, "_exactly", fails)
    plain, x = Layers(), torch.randn(3, 4)
    fused: Any = epigemm.fuse(plain, strict=strict)
    torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=0)
    assert not fused.fusion_report.sites and "Planted: on purpose" in str(fused.fusion_report)


def test_a_flag() -> None:
    with pytest.raises(TypeError, match="strict: got int; accepted is True or False"):
        epigemm.fuse(Layers(), strict=1)  # type: ignore[call-overload]
