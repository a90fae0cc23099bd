"""Plain calls and the packs of their weights where `keep_packs` is on. Its switches: arguments/test_modes.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.operators import graphs
from epigemm.packs import keep_mode, weight_packs
from tests.support.pieces import Road
from tests.support.public import PUBLIC_LINEAR, Public


@pytest.fixture(autouse=True)
def mode_is_left() -> Iterator[None]:
    yield
    left = keep_mode.active or keep_mode.traced is not None
    epigemm.set_keep_packs(False)
    assert not left


def in_a_thread(look: Callable[[], Any]) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


# --- what calls do ---------------------------------------------------------------------------------------------------


def packed(road: Road) -> list[bool]:
    return [launch.packed for launch in road.take()]


@pytest.mark.every(4)
@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_plain_calls_keep_the_packs_of_parameters(function: Public, road: Road, rng: torch.Generator) -> None:
    arguments = function.draw(rng, shape=road.size, device=road.device)
    arguments["weight"] = nn.Parameter(arguments["weight"])
    out = torch.empty(road.size[0], road.size[1], device=road.device)
    with torch.no_grad():
        expected = function.call(**arguments)
        assert packed(road) == [False]
        with epigemm.keep_packs():
            for options in ({}, {}, {"out": out}):
                torch.testing.assert_close(function.call(**arguments, **options), expected)
        assert packed(road) == [True] * 3 and list(weight_packs.kept(arguments["weight"])) == [2]
        with epigemm.keep_packs(False):
            function.call(**arguments)
        assert packed(road) == [True], "a current pack is used outside of the mode"
        arguments["weight"].mul_(2)
        function.call(**arguments)
        assert packed(road) == [False], "but not made again"


def test_explain_says_so(road: Road) -> None:
    weight, x = nn.Parameter(road.weight()), road.x()
    with torch.no_grad():
        with epigemm.keep_packs():
            assert any(
                "made by this call and kept" in r for r in epigemm.explain("linear", x, weight).reasons
            )
        assert any("split at every call" in r for r in epigemm.explain("linear", x, weight).reasons)


# --- torch.compile ---------------------------------------------------------------------------------------------------


def uses_of(function: Callable[..., Any]) -> tuple[Any, list[str]]:
    """`function`, compiled without graph breaks, and what the calls in its graphs may do with packs."""
    torch._dynamo.reset()
    uses: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        at = [argument.name for argument in torch.ops.epigemm.linear.default._schema.arguments].index("pack")
        uses.extend(node.args[at] for node in graph.graph.nodes if "epigemm" in str(node.target))
        return graph.forward

    return torch.compile(function, backend=look, fullgraph=True), uses


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return epigemm.linear(x, weight)


def block_inside(x: Tensor, weight: Tensor) -> Tensor:
    with epigemm.keep_packs():
        kept = epigemm.linear(x, weight)
        with epigemm.keep_packs(False):
            kept = kept + epigemm.linear(x, weight)
    return kept + epigemm.linear(x, weight)


@epigemm.keep_packs()
def decorated(x: Tensor, weight: Tensor) -> Tensor:
    return epigemm.linear(x, weight)


def calls_decorated(x: Tensor, weight: Tensor) -> Tensor:
    return decorated(x, weight) + epigemm.linear(x, weight)


def statement_inside(x: Tensor, weight: Tensor) -> Tensor:
    epigemm.set_keep_packs(True)
    return epigemm.linear(x, weight)


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold the operators that know of packs, as where calls may run on fp16 slices."""
    monkeypatch.setattr(graphs, "native", lambda *_: None)


@pytest.mark.usefixtures("by_operator")
@pytest.mark.parametrize(
    ("function", "expected"),
    [(block_inside, ["keep", "find", "find"]), (calls_decorated, ["keep", "find"])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_compiled_code_may_use_it(function: Callable[..., Any], expected: list[str]) -> None:
    compiled, uses = uses_of(function)
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(3, 8))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight), function(x, weight))
        assert uses == expected
        assert not keep_mode.enabled() and keep_mode.traced is None
        compiled(x, nn.Parameter(torch.randn(3, 8)))
        assert uses == expected, "compiled again"


@pytest.mark.usefixtures("by_operator")
def test_compiled_code_is_guarded() -> None:
    compiled, uses = uses_of(plain)
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(3, 8))
    with torch.no_grad():
        compiled(x, weight)
        with epigemm.keep_packs():
            compiled(x, weight)
        epigemm.set_keep_packs(True)
        compiled(x, weight)
        epigemm.set_keep_packs(False)
        compiled(x, weight)
        with epigemm.keep_packs():
            compiled(x, weight.detach())
    assert uses == ["find", "keep", "find"], "once for each: off, on, on with a weight that is no Parameter"


def test_a_graph_break_inside_of_a_block() -> None:
    @torch.compile(backend="eager")
    def broken(x: Tensor, weight: Tensor) -> tuple[bool, Tensor]:
        with epigemm.keep_packs():
            y = epigemm.linear(x, weight)
            torch._dynamo.graph_break()
            with epigemm.keep_packs(False):
                inside = not keep_mode.enabled()
            inside = inside and keep_mode.enabled()
        return inside, y

    torch._dynamo.reset()
    with torch.no_grad():
        assert broken(torch.randn(4, 8), nn.Parameter(torch.randn(3, 8)))[0]
    assert not keep_mode.enabled() and keep_mode.traced is None
