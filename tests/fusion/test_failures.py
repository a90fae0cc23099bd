"""A pass or a compiler that fails: the model runs as it was, the report and one warning say so, `strict` raises it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
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
from tests.support.watching import failing

SAYS = "epigemm's pass failed"


class Planted(Exception):
    """Nothing that anybody else raises."""


PLANTED = {
    "at once": lambda: failing(rewrite.fuse_graph, Planted("on purpose\nand more")),
    # When the graph has been changed already.
    "on the way": lambda: failing(rewrite._replace, Planted("on purpose\nand more"), after=1),
}


class Layers(nn.Module):
    """Writes a buffer, and has an attribute that is a number."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.relu(self.second(torch.relu(self.first(x)))) - x * self.factor + self.calls


@pytest.fixture(autouse=True)
def nobody_was_warned() -> None:
    rewrite.warn_once.cache_clear()


def run_quietly(call: Any, x: Tensor, about: str) -> tuple[Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call(x)
    return result, [str(each.message) for each in seen if about in str(each.message)]


@pytest.mark.parametrize("planted", PLANTED)
def test_fuse(planted: str) -> None:
    plain, x = Layers(), torch.randn(3, 4)
    fused: Any = fuse_eagerly(copy.deepcopy(plain))
    with PLANTED[planted]():
        result, said = run_quietly(fused, x, SAYS)
    torch.testing.assert_close(result, plain(x), rtol=0, atol=0)
    assert len(said) == 1 and "Planted" in said[0]
    report = fused.fusion_report
    assert not report.sites and {SAYS in skipped.reason for skipped in report.skipped} == {True}, report
    assert "Planted: " in str(report) and "and more" not in str(report)
    with PLANTED[planted]():
        assert run_quietly(fuse_eagerly(Layers()), x, SAYS)[1] == [], "it is said once"
    strict: Any = fuse_eagerly(Layers(), strict=True)
    for _ in range(2):
        says = f"{SAYS} on a graph: Planted: "
        with PLANTED[planted](), pytest.raises(BackendCompilerFailed, match=says) as caught:
            strict(x)
        assert type(caught.value.inner_exception.__cause__) is Planted
    with PLANTED[planted](), pytest.raises(RuntimeError, match=SAYS):
        fuse_eagerly(Layers(), strict=True, dry_run=True, example_inputs=(x,))


@pytest.mark.parametrize("planted", PLANTED)
def test_backend(planted: str) -> None:
    """The graph is as it was, for a compiler that reads what Dynamo has noted at the graph's inputs, too."""
    seen: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        graph_module.graph.lint()
        seen.append(graph_module.code)
        return graph_module.forward

    model, x, options = Layers(), torch.randn(3, 4), dict[str, Any](backend=backend)
    torch.compile(model, backend=backend)(x)
    plain = copy.deepcopy(model)
    for inner in (backend, "aot_eager"):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="epigemm", options={"backend": inner})
        with PLANTED[planted]():
            result, _ = run_quietly(compiled, x, SAYS)
        torch.testing.assert_close(result, plain(x))
    assert len(set(seen)) == 1 and len(seen) == 2
    strict = torch.compile(model, backend="epigemm", options={**options, "strict": True})
    with PLANTED[planted](), pytest.raises(Exception, match=f"{SAYS} on a graph: Planted: "):
        strict(x)


def raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


def lowering(error: Exception) -> Any:
    """`error` when Inductor has lowered a graph."""
    return patch.object(torch._inductor.graph.GraphLowering, "compile_to_module", raises(error))


INDUCTOR_FAILS: dict[str, Callable[[], Any]] = {
    "No working C.. compiler": lambda: torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}),
    "Cannot find a working triton": lambda: lowering(TritonMissing(None)),
    "lowering: on purpose": lambda: lowering(
        LoweringException(Planted("lowering: on purpose"), print, [], {})
    ),
    "early: on purpose": lambda: patch.object(
        torch._inductor.compile_fx, "compile_fx", raises(Planted("early: on purpose"))
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("says", "by"), in_turn([*INDUCTOR_FAILS], ["fuse", "torch.compile"]))
def test_inductor_fails(says: str, by: str, strict: bool) -> None:
    """The graph runs operator by operator, one warning and the report say so, and `strict` raises it."""
    plain, reports = Layers(), list[FusionReport]()
    options: dict[str, Any] = {"report": reports.append, "strict": strict}
    model = copy.deepcopy(plain)
    made: Any = (
        epigemm.fuse(model, inplace=True, options=options)
        if by == "fuse"
        else torch.compile(model, backend="epigemm", options=options)
    )
    said: list[str] = []
    with torch._inductor.config.patch({"force_disable_caches": True}), INDUCTOR_FAILS[says]():
        if strict:
            with pytest.raises(Exception, match=says):
                made(torch.randn(3, 4))
            assert not model.calls and not reports
            return
        for rows in (3, 5):
            x = torch.randn(rows, 4, requires_grad=True)
            result, new = run_quietly(made, x, "Inductor")
            expected, said = plain(x), said + new
            torch.testing.assert_close(result, expected)
            gradients = [torch.autograd.grad(each.square().sum(), x) for each in (result, expected)]
            torch.testing.assert_close(*gradients)
    assert len(said) == 1
    assert re.search(f"Inductor failed on it, and it runs operator by operator: .*{says}", said[0])
    assert len(reports) == 2 and all(len(report.sites) == 2 and not report.skipped for report in reports)
    assert all(re.search(says, str(report)) for report in reports)
