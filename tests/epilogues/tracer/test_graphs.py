"""The trace of a function leaves all other threads alone, and waits for none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace as fx_trace
from torch.fx.experimental.proxy_tensor import make_fx

import epigemm
from tests.support.other_threads import TIMEOUT, compile_until, export_until, others

X, WEIGHT = torch.randn(6, 8), torch.randn(4, 8)
ORIGINAL = nn.Module.__call__, nn.Module.__getattr__


def pause() -> None:
    """For a function that is traced, which may capture no object that can change: the thread has what to do."""
    threading.current_thread().inside()  # type: ignore[attr-defined]


def decorate_until(inside: Callable[[], None]) -> None:
    def body(acc: Tensor) -> Tensor:
        pause()
        return torch.tanh(acc)

    vars(threading.current_thread())["inside"] = inside
    epigemm.epilogue(body)


def graph_until(inside: Callable[[], None]) -> None:
    """Decorates in code that Dynamo leaves, within a compiled function."""
    leave: Any = torch.compiler.disable(decorate_until)  # type: ignore[no-untyped-call]

    def function(x: Tensor) -> Tensor:
        x = x * 2
        leave(inside)
        return x + 1

    torch.compile(function, backend="eager")(X)


def decorates() -> Any:
    return epigemm.epilogue(lambda acc: torch.sigmoid(acc) * 2)(X, WEIGHT)


def makes_a_graph() -> Any:
    found = make_fx(lambda x: torch.nn.functional.silu(x))(X)
    assert any(node.target is torch.ops.aten.silu.default for node in found.graph.nodes)  # not decomposed
    return found(X)


def compiles() -> Any:
    return torch.compile(lambda x: torch.relu(x) + 1, backend="eager", fullgraph=True)(X)


def compiles_by_inductors_way() -> Any:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    torch.compile(layers, backend="epigemm", options={"backend": "aot_eager"})(X)


def fuses() -> Any:
    fused: Any = epigemm.fuse(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    fused(X)
    assert len(fused.fusion_report.sites) == 1, fused.fusion_report


compiled = torch.compile(lambda x: torch.relu(x @ WEIGHT.t()), backend="eager")


WHILE_DECORATING = {
    "calls a compiled function": lambda: compiled(X),
    "compiles": compiles,
    "compiles with gradients": compiles_by_inductors_way,
    "fuses": fuses,
    "traces": makes_a_graph,
    "decorates": decorates,
}


@pytest.mark.parametrize("where", [decorate_until, graph_until])
@pytest.mark.parametrize("what", WHILE_DECORATING)
def test_while_another_thread_decorates(what: str, where: Callable[[Callable[[], None]], None]) -> None:
    torch._dynamo.reset()
    compiled(X)
    with others(where):
        assert (nn.Module.__call__, nn.Module.__getattr__) == ORIGINAL
        assert not fx_trace._is_fx_tracing_flag
        WHILE_DECORATING[what]()
    assert (nn.Module.__call__, nn.Module.__getattr__) == ORIGINAL


@pytest.mark.parametrize("other", [compile_until, export_until, decorate_until])
def test_decorating_waits_for_no_other_thread(other: Callable[[Callable[[], None]], None]) -> None:
    torch._dynamo.reset()
    with others(other):
        torch.testing.assert_close(decorates(), torch.sigmoid(X @ WEIGHT.t()) * 2)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    assert (nn.Module.__call__, nn.Module.__getattr__) == ORIGINAL


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_many_threads_decorate_at_once(default: torch.dtype) -> None:
    """All are in the middle of their traces at the same time, and each gets its own function, of fp32 numbers."""
    count = 4
    barrier = threading.Barrier(count)
    found: dict[int, Any] = {}

    def decorate(number: int) -> None:
        def body(acc: Tensor) -> Tensor:
            first = torch.tanh(acc)
            pause()
            return first * torch.where(acc > 0, number + 0.1, 0.7) + torch.sigmoid(acc)

        vars(threading.current_thread())["inside"] = lambda: barrier.wait(TIMEOUT)
        found[number] = epigemm.epilogue(body)

    threads = [threading.Thread(target=decorate, args=(number,)) for number in range(count)]
    torch.set_default_dtype(default)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert torch.get_default_dtype() is default
    finally:
        torch.set_default_dtype(torch.float32)
    z = X @ WEIGHT.t()
    for number in range(count):
        expected = torch.tanh(z) * torch.where(z > 0, number + 0.1, 0.7) + torch.sigmoid(z)
        torch.testing.assert_close(found[number](X, WEIGHT), expected)
