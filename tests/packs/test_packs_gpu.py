"""Packs among other CUDA work: graphs, streams, threads, the allocator, and what a call costs the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.packs import weight_packs
from tests.support.pieces import Road, watched

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda
SPIN = 200_000_000  # clock cycles, about 0.1 s


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    with watched(torch.device("cuda"), monkeypatch) as watching:
        yield watching


def layer(road: Road) -> tuple[nn.Linear, epigemm.nn.LinearReLU]:
    linear = nn.Linear(road.size[2], road.size[1], device=road.device)
    return linear, epigemm.nn.LinearReLU.from_linear(linear)


def agree(actual: Tensor, linear: nn.Linear, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(actual, torch.relu(linear(x)), rtol=1e-4, atol=1e-4)


def capture(module: nn.Module, x: Tensor) -> tuple[Any, Tensor]:
    graph = cuda.CUDAGraph()
    with torch.no_grad():
        module(x)
        with torch.cuda.graph(graph):
            out = module(x)
    return graph, out


def read_late(
    module: nn.Module, x: Tensor, before: Callable[[], object] = lambda: None
) -> tuple[Any, Tensor]:
    """A side stream that is held up, and what the module gives there, whose parameters may be freed."""
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cuda._sleep(SPIN)
        before()
        result = module(x)
        for parameter in module.parameters():  # torch's own rule for what it allocated elsewhere
            parameter.record_stream(side)
    return side, result


def take_freed_memory(size: int, side: Any) -> None:
    """What would be given away too early is written, before the stream has read it."""
    gc.collect()
    for _ in range(4):
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    side.synchronize()


def test_a_captured_module_follows_its_weight(road: Road) -> None:
    """Without a pack the graph reads or splits the weight at every replay."""
    linear, module = layer(road)
    x = road.x()
    graph, out = capture(module, x)
    assert [launch.packed for launch in road.take()] == [False, False]
    for _ in range(3):
        with torch.no_grad():
            linear.weight.mul_(-1.5)
        out.fill_(float("nan"))
        graph.replay()
        agree(out, linear, x)


def test_a_frozen_graph_follows_repack(road: Road) -> None:
    linear, module = layer(road)
    x = road.x()
    packed = epigemm.pack(module.weight)
    graph, out = capture(module, x)
    assert [launch.packed for launch in road.take()] == [True, True]
    graph.replay()
    agree(out, linear, x)
    before = out.clone()
    with torch.no_grad():
        linear.weight.mul_(-1.5)
    graph.replay()
    assert torch.equal(out, before), "documented: the graph is frozen to the pack"
    packed.repack()
    graph.replay()
    agree(out, linear, x)


def test_repack_during_capture_is_refused(road: Road) -> None:
    _, module = layer(road)
    packed = epigemm.pack(module.weight)
    graph = cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="repack: got a call under CUDA graph capture"):
            packed.repack()
        torch.zeros(1, device="cuda")


def test_graphed_training_follows_plain_pytorch(road: Road) -> None:
    """torch.cuda.make_graphed_callables, whose warm-up changes no weight."""
    linear, module = layer(road)
    plain = nn.Linear(road.size[2], road.size[1], device=road.device)
    plain.load_state_dict(linear.state_dict())
    x = road.x()
    packed = epigemm.pack(module.weight)
    graphed: Any = torch.cuda.make_graphed_callables(module, (x.clone(),))
    target = torch.rand(road.size[0], road.size[1], device=road.device)
    losses: list[list[float]] = [[], []]
    calls: list[tuple[Any, Any, list[float]]] = [
        (graphed, module.parameters(), losses[0]),
        (lambda given: torch.relu(plain(given)), plain.parameters(), losses[1]),
    ]
    for call, parameters, found in calls:
        optimise = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        for _ in range(4):
            loss = (call(x) - target).square().mean()
            found.append(loss.item())
            loss.backward()
            optimise.step()
            optimise.zero_grad()
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=0.0)
    with torch.no_grad():
        agree(module(x), linear, x)
        packed.repack()
        agree(module(x), linear, x)


@pytest.mark.slow
def test_cuda_graphs_of_torch_compile(road: Road) -> None:
    """mode="reduce-overhead": its graphs read the pack, which is not in their private pool."""
    torch.compiler.reset()
    linear, module = layer(road)
    x = road.x()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    packed = epigemm.pack(module.weight)
    with torch.no_grad():
        for step in range(6):
            agree(compiled(x).clone(), linear, x)
            if step >= 3:
                linear.weight.mul_(-1.5)
                packed.repack()


def test_a_pack_made_on_another_stream(road: Road) -> None:
    """The reader waits for the kernel that makes the pack, and for nothing on the host."""
    linear, module = layer(road)
    x = road.x()
    side, other = cuda.Stream(), cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad():
        with torch.cuda.stream(side):
            cuda._sleep(SPIN)
            epigemm.pack(module.weight)
        with torch.cuda.stream(other):
            late = module(x)
        on_default = module(x)
    other.synchronize()
    agree(late, linear, x)
    agree(on_default, linear, x)
    assert [launch.packed for launch in road.take()] == [True, True]


def test_a_pack_outlives_its_last_reader(road: Road) -> None:
    """Freed while a side stream still reads it: the allocator must not hand the memory out again before."""
    x = road.x()
    linear, module = layer(road)
    epigemm.pack(module.weight)
    with torch.no_grad():
        expected = module(x).clone()
        size = weight_packs.kept(module.weight)[2].buffer.shape[0]
        side, result = read_late(module, x)
    del linear, module
    take_freed_memory(size, side)
    assert torch.equal(result, expected)


def test_a_pack_outlives_the_stream_that_rewrote_it(road: Road) -> None:
    """Made again on a side stream that had never read it, then freed: the same promise."""
    x = road.x()
    linear, module = layer(road)
    with torch.no_grad():
        epigemm.pack(module.weight)
        module(x)
        address = weight_packs.kept(module.weight)[2].buffer.data_ptr()
        size = weight_packs.kept(module.weight)[2].buffer.shape[0]
        linear.weight.mul_(2)
        expected = torch.relu(linear(x))
        side, result = read_late(module, x, partial(epigemm.pack, module.weight))
        assert weight_packs.kept(module.weight)[2].buffer.data_ptr() == address
    del linear, module
    take_freed_memory(size, side)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_new_data_leaves_the_readers_of_the_old_alone(road: Road) -> None:
    """`weight.data = other` waits for nobody: no call writes the pack while a side stream reads it."""
    x, other = road.x(), road.weight()
    linear, module = layer(road)
    epigemm.pack(module.weight)
    with torch.no_grad():
        expected = module(x).clone()
        side, result = read_late(module, x)
        linear.weight.data = other
        agree(module(x), linear, x)
    side.synchronize()
    assert torch.equal(result, expected)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A block in which torch raises an error in place of waiting for the device."""

    @contextmanager
    def block() -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield block
    torch.cuda.synchronize()


def test_nothing_waits_for_the_device(
    road: Road, no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    """Making, finding and remaking a pack, and a result that is copied.

    torch tells of its own waiting; that csrc never waits is a rule of the sources (tests/csrc/test_source_rules.py).
    """
    _, module = layer(road)
    _, fresh = layer(road)
    x, narrow = road.x(), road.weight()[:-1]
    packed = epigemm.pack(module.weight)
    with torch.no_grad():
        module(x)
        epigemm.linear(x, narrow)
        road.take()
        with no_waiting():
            module(x)
            module.weight.mul_(2)
            packed.repack()
            module(x)
            epigemm.linear(x, epigemm.pack(fresh.weight))
            epigemm.linear(x, narrow)
        assert [launch.packed for launch in road.take()][:3] == [True] * 3


def test_waiting_would_be_seen(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """What the test above relies on."""
    x = torch.ones(4, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


def test_memory(road: Road) -> None:
    """A kept pack costs what `nbytes` says, is freed with its weight, and calls leave nothing behind."""
    x = road.x()
    packed = epigemm.pack(nn.Parameter(road.weight()))
    with torch.no_grad():
        epigemm.linear(x, packed)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            epigemm.linear(x, packed)
        assert torch.cuda.memory_allocated() == before
        held = packed.nbytes + packed.weight.nbytes
        del packed
        gc.collect()
        assert before - torch.cuda.memory_allocated() >= held


def fill_memory() -> list[torch.Tensor]:
    """Whatever is left of this process's share, also in segments that earlier tests have left half empty."""
    filled = []
    for exponent in range(36, 19, -1):
        while True:
            try:
                filled.append(torch.empty(2**exponent, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return filled


def test_really_out_of_memory(road: Road) -> None:
    """Room for the result but not for pieces: torch multiplies."""
    x, weight = torch.randn(4096, 4096, device="cuda"), torch.randn(2048, 4096, device="cuda") / 64
    out = torch.empty(4096, 2048, device="cuda")
    expected = epigemm.linear(x, weight)
    road.take()
    torch.cuda.empty_cache()
    try:
        used = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((used + 2**20) / total)
        filled = fill_memory()
        epigemm.linear(x, weight, out=out)
        with pytest.raises(torch.OutOfMemoryError):
            epigemm.linear(x, weight, out=out, strict=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert filled is not None and not road.take()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_moving_between_devices(road: Road) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: only one CUDA device")
    linear, module = layer(road)
    x = road.x()
    with torch.no_grad():
        for index in (0, 1, 0):
            linear.to(f"cuda:{index}")
            there = x.to(f"cuda:{index}")
            agree(module(there), linear, there)
            epigemm.pack(module.weight)
            agree(module(there), linear, there)
            assert torch.cuda.current_device() == 0
