"""When packs are made and read: training, short calls, captures, graphs, threads. Values: test_packs.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import epigemm
from epigemm.packs import weight_packs
from tests.packs.test_packs import HOLDERS, by_layer, holders, packed
from tests.support.pieces import AT_HIGHEST, Road
from tests.support.untyped import backward


def test_a_frozen_weight_keeps_its_pack_beside_gradients(road: Road) -> None:
    held, x = by_layer(road), road.x().requires_grad_()
    held.weight.requires_grad_(False)
    result = held.call(x)
    weight_packs.expire(held.weight)
    backward(result.sum())
    assert [launch.packed for launch in road.take() if launch.shape == road.size] == [True]


def test_a_stale_pack_is_not_made_again_for_one_short_call(road: Road) -> None:
    """A weight that changes before every call would cost more than torch's GEMM; one that stays gets its pack."""
    weight, x = road.weight(), road.x(road.rows_worth_a_pack_alone())
    held = epigemm.pack(weight)
    for _ in range(3):
        weight.mul_(1.5)
        road.check(epigemm.linear(x, held), x, weight)
    assert not road.take()
    for _ in range(2):
        road.check(epigemm.linear(x, held), x, weight)
    assert packed(road) == [True, True]


def test_a_capture_reads_packs_made_on_purpose_alone(road: Road) -> None:
    """A graph sees later changes of the weight unless the caller froze it, and makes no pack."""
    held, x = by_layer(road), road.x()
    held.check(x)
    road.take()

    def captured() -> list[bool]:
        road.capturing = road.device.type == "cpu"
        with torch.no_grad():
            held.call(x)
        road.capturing = False
        return packed(road)

    if road.device.type == "cpu":
        assert captured() == [False]
        held.repack()
        assert captured() == [True]
        road.capturing = True
        with torch.no_grad():
            epigemm.linear_relu(x, held.weight)
        road.capturing = False
        assert packed(road) == [False], "a plain weight says nothing about being frozen"
        with torch.no_grad():
            held.weight.mul_(2)
        assert captured() == [False], "stale"
        held.check(x)
        road.take()
        assert captured() == [True], "frozen on purpose, it stays so"
        road.capturing = True
        with pytest.raises(RuntimeError, match="repack: got a call under CUDA graph capture"):
            held.repack()


def test_a_weight_made_for_one_call_is_not_packed(road: Road) -> None:
    """That of a functional call, and a parametrised one: packing would cost every call what only many repay."""
    layer = epigemm.nn.LinearReLU(road.size[2], road.size[1], bias=False, device=road.device)
    x, other = road.x(), road.weight()
    with torch.no_grad():
        found = torch.func.functional_call(layer, {"weight": other}, (x,))
        torch.testing.assert_close(found, F.linear(x, other).relu(), rtol=1e-4, atol=1e-4)
        nn.utils.parametrizations.weight_norm(layer)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight).relu(), rtol=1e-4, atol=1e-4)
    assert packed(road) == [False, False] and not weight_packs.kept(other)


@pytest.mark.parametrize("use", ["keep", "find", "none"])
def test_what_the_operator_may_do_with_packs(use: str, road: Road) -> None:
    weight, x = Parameter(road.weight()), road.x()
    epigemm.pack(weight)
    with torch.no_grad():
        for _ in range(2):
            road.check(torch.ops.epigemm.linear("bias", x, weight, *AT_HIGHEST, use), x, weight)
            weight.mul_(2)
    assert packed(road) == [use != "none", use == "keep"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_operator_believes_no_pack_where_a_gradient_is_wanted(is_compiled: bool, road: Road) -> None:
    """Traced or not: nothing counts the change, and the next plain call makes the pack again."""
    torch.compiler.reset()
    weight, x = Parameter(road.weight()), road.x()
    epigemm.pack(weight)

    def call(given: Tensor) -> Tensor:
        result: Tensor = torch.ops.epigemm.linear("bias", given, weight, *AT_HIGHEST, "keep")
        return result

    run: Any = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
    for _ in range(2):
        weight.data.mul_(2)
        result = run(x)
        road.check(result, x, weight)
        backward(result.sum())
        with torch.no_grad():
            road.check(call(x), x, weight)
    assert [launch.packed for launch in road.take() if launch.shape == road.size] == [False, True] * 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_graphs_find_the_packs(backend: str, is_exported: bool, road: Road) -> None:
    """The parameter reaches the operator as the object that it is; changes are followed."""
    torch.compiler.reset()
    held, x = by_layer(road), road.x()
    module: Any = held.call
    with torch.no_grad():
        call = torch.export.export(module, (x,)).module() if is_exported else module
        compiled: Any = torch.compile(call, fullgraph=True, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), held.plain(x), rtol=1e-4, atol=1e-4)
            (held.weight if not is_exported else next(call.parameters())).mul_(1.5)
            if is_exported:
                held = held._replace(plain=lambda x: F.linear(x, *call.parameters()).relu())
    assert packed(road) == [True] * 3


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
    expected, wrong = held.plain(x).detach(), []

    def work() -> None:
        for _ in range(3):
            with torch.no_grad():
                if not torch.allclose(held.call(x), expected, rtol=1e-3, atol=1e-3):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_make_one_pack(road: Road) -> None:
    """At once, again and again, while others have it expire."""
    weight, x = road.weight(), road.x()
    barrier, wrong = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(5):
                torch.ops.epigemm.linear("bias", x, weight, *AT_HIGHEST, "keep")
                weight_packs.expire(weight)
        except Exception as error:  # in a thread nobody would see it
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len({launch.pack for launch in road.take()}) == 1
