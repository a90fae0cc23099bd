"""When packs are made and read: training, short calls, captures, graphs, threads. Values: test_packs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm.packs import weight_packs
from tests.packs.test_packs import HOLDERS, by_layer, holders, packed
from tests.support.pieces import AT_HIGHEST, Road, pack_size
from tests.support.pretended import allocate
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


class NoMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No memory for packs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.empty and (kwargs or {}).get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("no memory, for the test")
        return function(*args, **(kwargs or {}))


class Workspaces:
    """Workspaces for slices, of which there is none; and what the device tells to be free."""

    def __init__(self, road: Road) -> None:
        self._road = road
        self._refused = 0
        road.module.free, road.module.allocate = 0, self._allocate

    def _allocate(self, size: int) -> Tensor:
        self._refused += 1
        raise torch.OutOfMemoryError("no memory, for the test")

    def tell(self, free: int) -> None:
        self._road.module.free = free

    def refused(self) -> int:
        """How many since the last time."""
        count, self._refused = self._refused, 0
        return count

    def give(self) -> None:
        self._road.module.free, self._road.module.allocate = None, allocate


def notes(*arguments: Any) -> str:
    return " ".join(epigemm.explain("linear", *arguments).reasons)


def test_without_memory_torch_multiplies(road: Road) -> None:
    """Tried once, then again only when there is enough."""
    weight, x = road.weight(), road.x(4096)  # so many that the weight is split
    memory = Workspaces(road)
    for refused in (1, 0, 0):
        road.check(epigemm.linear(x, weight), x, weight)
        assert memory.refused() == refused
    assert "found no memory for fp16 slices" in notes(x, weight)
    with pytest.raises(torch.OutOfMemoryError):
        epigemm.linear(x, weight, strict=True)
    memory.refused()
    epigemm.linear(x[:-1], weight)
    assert memory.refused() == 1, "another call"
    enough = pack_size(x, 2) + pack_size(weight, 2)
    for free, refused in ((enough - 1, 0), (enough, 1)):
        memory.tell(free)
        epigemm.linear(x, weight)
        assert memory.refused() == refused
    assert not road.take()
    road.capturing = True
    epigemm.linear(x, weight)
    assert not memory.refused(), "nothing is asked for in a capture"
    road.capturing = False
    memory.give()
    road.check(epigemm.linear(x, weight), x, weight)
    assert len(road.take()) == 1
    assert "found no memory" not in notes(x, weight)


def test_a_weight_that_is_read_as_it_lies_needs_no_memory_for_slices(road: Road) -> None:
    x, weight = (torch.randn(rows, 4096).to(road.device) for rows in (64, 4096))
    memory = Workspaces(road)
    for free, refused in ((0, 1), (-1, 0), (0, 1)):
        memory.tell(pack_size(x, 2) + free)
        epigemm.linear(x, weight)
        assert memory.refused() == refused


def test_without_memory_to_keep_pack_raises(road: Road) -> None:
    weight, x = road.weight(), road.x()
    with NoMemory(), pytest.raises(torch.OutOfMemoryError):
        epigemm.pack(weight)
    assert not weight_packs.kept(weight)
    road.check(epigemm.linear(x, weight), x, weight)
