"""Packs of the halves of a Parameter's rows: each call makes views of it, whose packs are the Parameter's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import epigemm
from epigemm.packs import weight_packs
from tests.support.gated import draw
from tests.support.pieces import Road, decode

ROWS, COLUMNS, SLICES = 6, 16, 2


def views(weight: Tensor) -> tuple[Tensor, ...]:
    """New ones, as each call makes them."""
    with torch.no_grad():
        return weight.chunk(2)


def test_views_of_a_half_have_one_pack() -> None:
    weight = Parameter(torch.randn(ROWS, COLUMNS))
    packs = [weight_packs.keep(half, SLICES) for half in views(weight)]
    assert packs[0] is not packs[1]
    for half, pack in zip(views(weight), packs, strict=True):
        assert weight_packs.find(half, SLICES) is pack and pack.is_current(half)
        found = decode(pack.buffer, ROWS // 2, COLUMNS, SLICES)
        torch.testing.assert_close(found, half.double(), rtol=2e-6, atol=2e-6)
    assert not weight_packs.kept(weight), "the whole weight has none"


def test_what_is_no_half_of_a_parameter() -> None:
    """Other rows, other columns and other tensors: packs are of the tensor object, as ever."""
    weight, plain = Parameter(torch.randn(ROWS, COLUMNS)), torch.randn(ROWS, COLUMNS)
    with torch.no_grad():
        others = [weight[1:4], weight[:2], weight[:, : COLUMNS // 2], weight.t()[:8], plain[:3]]
    for other in others:
        weight_packs.keep(other, SLICES)
        assert weight_packs.find(other, SLICES) is not None
    assert all(weight_packs.find(half, SLICES) is None for half in (*views(weight), *views(plain)))


def test_they_follow_the_parameter() -> None:
    weight = Parameter(torch.randn(ROWS, COLUMNS))
    packs = [weight_packs.keep(half, SLICES) for half in views(weight)]

    def are_current() -> list[bool]:
        return [pack.is_current(half) for half, pack in zip(views(weight), packs, strict=True)]

    assert are_current() == [True, True]
    with torch.no_grad():
        weight[0] += 1
    assert are_current() == [False, False]
    packs = [weight_packs.keep(half, SLICES) for half in views(weight)]
    weight_packs.expire(weight)  # as a fused optimiser's step does
    assert are_current() == [False, False]
    packs = [weight_packs.keep(half, SLICES) for half in views(weight)]
    weight.data = torch.randn(ROWS, COLUMNS)
    assert are_current() == [False, False]
    kept = [weight_packs.keep(half, SLICES) for half in views(weight)]
    assert kept[0] is not packs[0], "products on other streams may still read the old one"


def test_a_step_of_an_optimiser() -> None:
    weight = Parameter(torch.randn(ROWS, COLUMNS))
    packs = [weight_packs.keep(half, SLICES) for half in views(weight)]
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()
    assert not any(pack.is_current(half) for half, pack in zip(views(weight), packs, strict=True))


def test_they_are_freed_with_the_parameter() -> None:
    weight = Parameter(torch.randn(ROWS, COLUMNS))
    buffers = [weakref.ref(weight_packs.keep(half, SLICES).buffer) for half in views(weight)]
    weight_packs.drop(views(weight)[0])
    assert buffers[0]() is None and buffers[1]() is not None
    weight_packs.drop(weight)
    assert buffers[1]() is None
    buffers = [weakref.ref(weight_packs.keep(half, SLICES).buffer) for half in views(weight)]
    del weight
    gc.collect()
    assert [each() for each in buffers] == [None, None]


@pytest.mark.parametrize("times", [1, 2])
def test_repacked_without_a_pack_of_the_whole(road: Road, times: int) -> None:
    weight = Parameter(torch.cat((road.weight(), road.weight())))
    for _ in range(times):
        weight_packs.repack_halves(weight, None)
    weight.data.mul_(2)
    epigemm.pack(weight).repack()  # what a user calls after a write that nothing counts
    assert not weight_packs.kept(weight)
    for half in views(weight):
        pack = weight_packs.kept(half)[SLICES]
        assert pack.frozen and pack.is_current(half)
        held = decode(pack.buffer.cpu(), half.shape[0], half.shape[1], SLICES)
        torch.testing.assert_close(held, half.double().cpu(), rtol=2e-6, atol=2e-6)


def test_calls_keep_a_pack_of_each_half(road: Road) -> None:
    """Under `keep_packs`, of one Parameter with the rows of both products; x is split by each of the two."""
    m, n, k = road.size
    whole = draw((m,), n, k, torch.float32, bias=False, device=road.device).whole
    x, weight = whole[0], Parameter(whole[1])
    with torch.no_grad(), epigemm.keep_packs():
        results = [epigemm.linear_glu(x, weight) for _ in range(2)]
    launches = road.take()
    assert [launch.packed for launch in launches] == [True] * 4
    assert len({launch.pack for launch in launches}) == 2 and not weight_packs.kept(weight)
    assert torch.equal(*results)
    with torch.no_grad():
        epigemm.linear_glu(x, weight)
    assert [launch.packed for launch in road.take()] == [True, True], "outside of it they are found"
    epigemm.linear_glu(x, weight)
    assert [launch.packed for launch in road.take()] == [False, False], "the weight is being trained"
    with torch.no_grad():
        epigemm.linear_glu(x, weight)
    assert [launch.packed for launch in road.take()] == [False, False], "so its packs were let expire"
