"""The batch-invariant mode: its switches, and, on a CPU, its promise bit by bit. Refusals: net/errors.txt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import epigemm
from epigemm.arguments import invariance
from tests.support.cases import poisoned
from tests.support.invariance import bits
from tools.planner import ask_planner


@pytest.fixture(autouse=True)
def mode_is_left() -> Iterator[None]:
    yield
    assert not invariance.active and not epigemm.is_batch_invariant()


# --- bits on a CPU ---------------------------------------------------------------------------------------------------


@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 80), seed=st.integers(0, 1000), row=st.data()
)
def test_any_size(m: int, n: int, k: int, seed: int, row: st.DataObject) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(m, k, generator=rng), torch.randn(n, k, generator=rng)
    index = row.draw(st.integers(0, m - 1))
    with epigemm.batch_invariant():
        together = epigemm.linear_relu(x, weight)
        assert torch.equal(bits(together)[index], bits(epigemm.linear_relu(x[index], weight)))


# --- what calls pass through -----------------------------------------------------------------------------------------


def watching_backend(graphs: list[list[Any]]) -> Any:
    """Notes the last argument, the mode, of the operators in each graph."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "epigemm" in str(node.target)]
        # The native operator, which ordinary calls become, has no such argument.
        graphs.append([str(node.target) == "epigemm.linear" and node.args[-1] for node in calls])
        return graph.forward

    return compile_graph


def compiled_linear(graphs: list[list[Any]], weight: Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(
        lambda x: epigemm.linear_relu(x, weight), backend=watching_backend(graphs), fullgraph=True
    )


def test_compiled_functions_are_guarded_by_the_mode(rng: torch.Generator) -> None:
    graphs: list[list[Any]] = []
    x, weight = torch.randn(33, 70, generator=rng), torch.randn(48, 70, generator=rng)
    function = compiled_linear(graphs, weight)
    ordinary = bits(function(x))
    with epigemm.batch_invariant():
        invariant = bits(epigemm.linear_relu(x, weight))
        for _ in range(2):
            assert torch.equal(bits(function(x)), invariant)
    assert torch.equal(bits(function(x)), ordinary)
    epigemm.set_batch_invariant(True)
    try:
        assert torch.equal(bits(function(x)), invariant)
    finally:
        epigemm.set_batch_invariant(False)
    assert graphs == [[False], [True]], "one graph of each, each used again"


def test_compiled_functions_see_the_mode_of_any_thread(rng: torch.Generator) -> None:
    """Dynamo has no guard that belongs to a thread: rather one call too many in the mode than one too few."""
    graphs: list[list[Any]] = []
    function = compiled_linear(graphs, torch.randn(8, 16, generator=rng))
    x = torch.randn(4, 16, generator=rng)
    with epigemm.batch_invariant():
        thread = threading.Thread(target=function, args=(x,))
        thread.start()
        thread.join()
    assert graphs == [[True]]


def test_operators_called_directly_have_an_argument_instead(rng: torch.Generator) -> None:
    x, weight = torch.randn(33, 70, generator=rng), torch.randn(48, 70, generator=rng)
    call: tuple[Any, ...] = ("bias_relu", x, weight, None, [], [], "default")
    with epigemm.batch_invariant():
        expected = bits(epigemm.linear_relu(x, weight))
        ordinary = bits(torch.ops.epigemm.linear(*call))
    assert torch.equal(bits(torch.ops.epigemm.linear(*call)), ordinary)
    assert torch.equal(bits(torch.ops.epigemm.linear(*call, True, False, True)), expected)
    out = poisoned((33, 48), torch.float32, "cpu")
    torch.ops.epigemm.linear_out(*call, out, True, False, True)
    assert torch.equal(bits(out), expected)


# --- the fixed plan --------------------------------------------------------------------------------------------------

H200 = (90, 132, 1980, 4285000)


def fixed_plan(m: int, n: int, k: int, kind: str, gpu: tuple[int, ...] = H200) -> dict[str, Any]:
    dtype, arithmetic = (kind, "ieee") if kind in ("float16", "bfloat16") else ("float32", kind)
    return ask_planner("bias_relu", m, n, k, dtype, arithmetic, packed=True, invariant=True, gpu=gpu)


KINDS = ["float16", "bfloat16", "tf32", "split", "scaled"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tile_is_known(kind: str) -> None:
    """Another one would change results: no decision to make in passing."""
    depth = 32 if kind == "tf32" else 64
    for m in (1, 64, 4096, 65536):
        plan = fixed_plan(m, 4096, 4096, kind)
        assert plan["fused"] and plan["tile"] == f"128x128x{depth}" and plan["splits"] == 1
        assert plan["family"] == ("sm90_fp16x3" if kind in ("split", "scaled") else "sm90_tma")
        assert plan["schedule"] == ("cooperative" if kind == "split" else "pingpong")
        assert len(plan["candidates"]) == 1


@given(
    m=st.lists(st.integers(1, 65536), min_size=2, max_size=6),
    n=st.integers(1, 2000).map(lambda n: 8 * n),
    k=st.integers(2, 2000).map(lambda k: 8 * k),
    kind=st.sampled_from(KINDS),
)
def test_m_decides_nothing(m: list[int], n: int, k: int, kind: str) -> None:
    found = [fixed_plan(rows, n, k, kind) for rows in m]
    assert all(plan["why_not_covered"] == "" and len(plan["candidates"]) == 1 for plan in found)
    assert len({plan["why_not"] for plan in found}) == 1
    assert len({tuple(plan["candidates"][0]["plan"]) for plan in found}) == 1


# --- the switches of the mode -----------------------------------------------------------------------------------------


@pytest.fixture
def everywhere() -> Iterator[Callable[[bool], None]]:
    """The statement for all threads, undone behind the test."""
    yield epigemm.set_batch_invariant
    epigemm.set_batch_invariant(False)


block, enabled = epigemm.batch_invariant, epigemm.is_batch_invariant


def in_a_thread(look: Callable[[], Any]) -> Any:
    """What a new thread sees."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


def in_a_block(inner: bool) -> bool:
    with block(inner):
        return enabled()


@pytest.mark.parametrize("outer", [False, True])
def test_a_block_puts_back_what_was_before(outer: bool, everywhere: Callable[[bool], None]) -> None:
    everywhere(outer)
    for inner in (True, False):
        with block(inner):
            assert enabled() is inner
            with block(not inner):
                assert enabled() is not inner
            assert enabled() is inner
        assert enabled() is outer and in_a_thread(enabled) is outer
    with pytest.raises(KeyError), block(not outer):
        raise KeyError
    assert enabled() is outer


def test_an_object_serves_many_blocks_and_switches_nothing_before() -> None:
    first, second = block(), block(False)
    assert not enabled() and not in_a_thread(enabled)
    with first, second, first:
        assert enabled() and not in_a_thread(enabled)
    assert not enabled()
    with first:
        assert enabled()


def test_a_block_belongs_to_its_thread() -> None:
    """Compiled code, which asks a global of all threads, sees that some thread is in one."""
    with block():
        assert enabled() and not in_a_thread(enabled)
        assert in_a_thread(lambda: in_a_block(True)) and enabled()
        assert invariance.active and in_a_thread(lambda: invariance.active)
    assert in_a_thread(lambda: in_a_block(True)) and not enabled()


def test_a_statement_holds_in_every_thread(everywhere: Callable[[bool], None]) -> None:
    """But a block around the call comes first, also where the statement is made inside of it."""
    everywhere(True)
    assert enabled() and in_a_thread(enabled) and invariance.active
    assert not in_a_thread(lambda: in_a_block(False))
    everywhere(False)
    assert not enabled() and not in_a_thread(enabled)
    with block(False):
        everywhere(True)
        assert not enabled() and in_a_thread(enabled)
    assert enabled()


def test_a_decorated_function_runs_inside() -> None:
    def run(depth: int) -> list[bool]:
        """Recursive, so that the decorator's own object is entered more than once."""
        return [enabled(), *(inside(depth - 1) if depth else [])]

    inside: Callable[[int], list[bool]] = block()(run)

    assert not enabled(), "decorating switches nothing"
    assert inside(2) == [True] * 3 and inside.__name__ == "run"
    assert in_a_thread(lambda: inside(0)) == [True]
