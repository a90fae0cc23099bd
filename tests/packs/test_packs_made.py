"""When packs are made and read: training, short calls, captures, graphs, threads. Values: test_packs.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import epigemm
from epigemm.calls import weight_slices
from epigemm.packs import weight_packs
from tests.packs.test_packs import HOLDERS, by_layer, holders, packed
from tests.support.pieces import AT_HIGHEST, Road, pack_size
from tests.support.threads import at_once
from tests.support.untyped import backward


def test_a_frozen_weight_keeps_its_pack_beside_gradients(road: Road) -> None:
    held, x = by_layer(road), road.x().requires_grad_()
    held.weight.requires_grad_(False)
    result = held.call(x)
    weight_packs.expire(held.weight)
    backward(result.sum())
    assert [launch.packed for launch in road.take() if launch.shape == road.size] == [True]


def test_a_capture_reads_current_packs(road: Road) -> None:
    """A graph reads the pack at every replay. Without a current one it sees later changes of the weight."""
    if road.device.type != "cpu":
        pytest.skip("gpu: test_packs_gpu.py captures")
    held, x = by_layer(road), road.x()

    def captured() -> list[bool]:
        road.capturing = True
        with torch.no_grad():
            held.call(x)
        road.capturing = False
        return packed(road)

    assert captured() == [True]
    with torch.no_grad():
        held.weight.mul_(2)
    assert captured() == [False], "stale"
    held.repack()
    assert captured() == [True]
    road.capturing = True
    with pytest.raises(RuntimeError, match="repack: got a call under CUDA graph capture"):
        held.repack()


def test_a_weight_made_for_one_call_is_not_packed(road: Road) -> None:
    """That of a functional call, and a parametrised one."""
    layer = epigemm.nn.LinearReLU(road.size[2], road.size[1], bias=False, device=road.device)
    x, other = road.x(), road.weight()
    epigemm.pack(layer.weight)
    with torch.no_grad():
        found = torch.func.functional_call(layer, {"weight": other}, (x,))
        torch.testing.assert_close(found, F.linear(x, other).relu(), rtol=1e-4, atol=1e-4)
        nn.utils.parametrizations.weight_norm(layer)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight).relu(), rtol=1e-4, atol=1e-4)
    assert packed(road) == [False, False] and not weight_packs.kept(other)


@pytest.mark.parametrize("use", [True, False])
def test_what_the_operator_may_do_with_packs(use: bool, road: Road) -> None:
    weight, x = Parameter(road.weight()), road.x()
    epigemm.pack(weight)
    with torch.no_grad():
        for _ in range(2):
            road.check(torch.ops.epigemm.linear("bias", x, weight, *AT_HIGHEST, use), x, weight)
            weight.mul_(2)
    assert packed(road) == [use, False]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_operator_believes_no_pack_where_a_gradient_is_wanted(is_compiled: bool, road: Road) -> None:
    """Traced or not: nothing counts the change, so the pack is stale until `repack()`."""
    torch.compiler.reset()
    weight, x = Parameter(road.weight()), road.x()
    held = epigemm.pack(weight)

    def call(given: Tensor) -> Tensor:
        result: Tensor = torch.ops.epigemm.linear("bias", given, weight, *AT_HIGHEST)
        return result

    run: Any = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
    for _ in range(2):
        weight.data.mul_(2)
        result = run(x)
        road.check(result, x, weight)
        backward(result.sum())
        with torch.no_grad():
            road.check(call(x), x, weight)
            held.repack()
            road.check(call(x), x, weight)
    launches = [launch.packed for launch in road.take() if launch.shape == road.size]
    assert launches == [False, False, True] * 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_graphs_find_the_packs(backend: str, is_exported: bool, road: Road) -> None:
    """The parameter reaches the operator as the object that it is."""
    torch.compiler.reset()
    x = road.x()
    module: Any = epigemm.nn.LinearReLU(road.size[2], road.size[1], device=road.device)
    with torch.no_grad():
        call = torch.export.export(module, (x,)).module() if is_exported else module
        compiled: Any = torch.compile(call, fullgraph=True, backend=backend)
        weight, bias = call.parameters()
        held = epigemm.pack(weight)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), F.linear(x, weight, bias).relu(), rtol=1e-4, atol=1e-4)
            weight.mul_(1.5)
            torch.testing.assert_close(compiled(x), F.linear(x, weight, bias).relu(), rtol=1e-4, atol=1e-4)
            held.repack()
    assert packed(road) == [True, False] * 2


def test_packing_is_not_traced(road: Road) -> None:
    """In a compiled function it breaks the graph and happens where it stands."""
    torch.compiler.reset()
    weight, x = road.weight(), road.x()
    compiled = torch.compile(lambda given: epigemm.linear(given, epigemm.pack(weight)), backend="aot_eager")
    road.check(compiled(x), x, weight)
    assert packed(road) == [True]


@holders
def test_threads(holder: str, road: Road) -> None:
    """They share the packs, and each has what it would have alone."""
    held, x = HOLDERS[holder](road), road.x(64)
    expected = held.plain(x).detach()

    def work(_: int) -> None:
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(held.call(x), expected, rtol=1e-3, atol=1e-3)

    at_once(3, work)


def test_threads_make_one_pack(road: Road) -> None:
    """At once, again and again, while others have it expire."""
    weight, x = road.weight(), road.x()

    def work(_: int) -> None:
        for _ in range(5):
            epigemm.linear(x, epigemm.pack(weight))
            weight_packs.expire(weight)

    at_once(4, work)
    assert len({launch.pack for launch in road.take()} - {None}) == 1


# --- calls that cannot allocate the memory for their slices -----------------------------------------------------------


class Memory:
    """What the allocator gives and tells: nothing to those that are refused."""

    def __init__(self, road: Road, patch: pytest.MonkeyPatch) -> None:
        self._road = road
        self.free = 0
        self.refused: list[str] = []
        self._patch = patch

    def refuse(self, *what: str) -> None:
        """Packs, workspaces, or both."""
        if "pack" in what:
            self._patch.setattr(weight_packs, "KeptPack", self._failing("pack"))
        if "workspace" in what:
            self._patch.setattr(self._road.module, "allocate", self._failing("workspace"))
        self._patch.setattr(weight_slices, "_free_bytes", lambda device: self.free)

    def _failing(self, name: str) -> Callable[..., Tensor]:
        def fails(*arguments: Any) -> Tensor:
            self.refused.append(name)
            raise torch.OutOfMemoryError("no memory, for the test")

        return fails

    def take(self) -> list[str]:
        """What was refused since the last time."""
        taken, self.refused = self.refused, []
        return taken


def notes(*arguments: Any) -> str:
    return " ".join(epigemm.explain("linear", *arguments).reasons)


def test_without_memory_torch_multiplies(road: Road) -> None:
    """Tried once, then again only when there is enough."""
    weight, x = road.weight(), road.x(4096)  # so many that the weight is split
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(road, patch)
        memory.refuse("workspace")
        for refused in (["workspace"], [], []):
            road.check(epigemm.linear(x, weight), x, weight)
            assert memory.take() == refused
        assert "found no memory for fp16 slices" in notes(x, weight)
        with pytest.raises(torch.OutOfMemoryError):
            epigemm.linear(x, weight, strict=True)
        memory.take()
        epigemm.linear(x[:-1], weight)
        assert memory.take() == ["workspace"], "another call"
        memory.free = pack_size(x, 2) + pack_size(weight, 2) - 1
        epigemm.linear(x, weight)
        assert not memory.take()
        memory.free += 1
        epigemm.linear(x, weight)
        assert memory.take() == ["workspace"] and not road.take()
        with monkeypatched_capture(patch):
            epigemm.linear(x, weight)
            assert not memory.take(), "nothing is asked for in a capture"
    road.check(epigemm.linear(x, weight), x, weight)
    assert len(road.take()) == 1
    assert "found no memory" not in notes(x, weight)


def test_a_weight_that_is_read_as_it_lies_needs_no_memory_for_slices(road: Road) -> None:
    x, weight = (torch.randn(rows, 4096).to(road.device) for rows in (64, 4096))
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(road, patch)
        memory.refuse("workspace")
        for free, refused in ((0, ["workspace"]), (-1, []), (0, ["workspace"])):
            memory.free = pack_size(x, 2) + free
            epigemm.linear(x, weight)
            assert memory.take() == refused


@contextmanager
def monkeypatched_capture(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as inner:
        inner.setattr(weight_packs, "capturing", lambda device: True)
        yield


def test_without_memory_to_keep_pack_raises(road: Road) -> None:
    weight, x = road.weight(), road.x()
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(road, patch)
        memory.refuse("pack")
        with pytest.raises(torch.OutOfMemoryError):
            epigemm.pack(weight)
        assert not weight_packs.kept(weight)
        road.check(epigemm.linear(x, weight), x, weight)
