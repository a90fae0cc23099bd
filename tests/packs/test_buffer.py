"""One weight's slices: when they are current, when the weight has moved, and what a write puts into the buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.packs.buffer import KeptPack
from epigemm.packs.weight_packs import pack_bytes
from tests.support.untyped import torch as untyped

N, K = 12, 40


def made(weight: Tensor, slices: int = 2) -> KeptPack:
    pack = KeptPack(torch.zeros(pack_bytes(*weight.shape, slices), dtype=torch.uint8), slices)
    pack.write(weight)
    return pack


def bits(weight: Tensor, slices: int = 2) -> Tensor:
    buffer = torch.zeros(pack_bytes(*weight.shape, slices), dtype=torch.uint8)
    ops._split_rows_out(weight, slices, buffer)
    return buffer


@pytest.mark.parametrize("slices", [1, 2])
def test_a_write_splits_the_weight(slices: int) -> None:
    weight = torch.randn(N, K)
    pack = made(weight, slices)
    assert pack.is_current(weight) and not pack.has_moved(weight)
    assert torch.equal(pack.read(), bits(weight, slices))
    weight.mul_(3)
    pack.write(weight)
    assert torch.equal(pack.read(), bits(weight, slices)) and pack.is_current(weight)


def test_changes_that_make_it_stale() -> None:
    weight = torch.randn(N, K)
    changes: list[Callable[[], Tensor]] = [
        lambda: weight.add_(1),
        lambda: weight.t_(),
        lambda: weight.resize_(K - 1, N),
    ]
    for change in changes:
        pack = made(weight)
        change()
        assert not pack.is_current(weight) and not pack.has_moved(weight)


def test_a_weight_that_has_moved() -> None:
    weight = torch.randn(N, K)
    pack = made(weight)
    before = weight.data
    weight.data = before.clone()
    assert pack.has_moved(weight) and not pack.is_current(weight)
    weight.data = before
    assert not pack.has_moved(weight)


def test_a_write_that_torch_does_not_count() -> None:
    weight = torch.randn(N, K)
    pack = made(weight)
    weight.data.add_(1)
    assert pack.is_current(weight), "nobody has said so"
    pack.expire()
    assert not pack.is_current(weight) and not pack.has_moved(weight)
    pack.write(weight)
    assert pack.is_current(weight) and torch.equal(pack.read(), bits(weight))


def test_a_weight_that_has_settled() -> None:
    """A stale pack is made again once two calls have seen the same weight."""
    weight = torch.randn(N, K)
    pack = made(weight)
    weight.add_(1)
    assert not pack.is_settled(weight)
    pack.see(weight)
    assert pack.is_settled(weight)
    weight.add_(1)
    assert not pack.is_settled(weight)
    pack.see(weight)
    pack.expire()
    assert not pack.is_settled(weight)


def test_another_storage_at_the_same_address() -> None:
    """The pack holds the identity of a storage that is gone: no later one has it."""
    weight = torch.randn(N, K)
    pack = made(weight)
    seen = weight._version
    for _ in range(20):
        del weight
        weight = torch.randn(N, K)
        assert weight._version == seen and not pack.is_current(weight)


@pytest.mark.gpu
def test_another_stream_waits_for_the_write() -> None:
    weight = torch.randn(1024, 1024, device="cuda")
    buffer = torch.zeros(pack_bytes(1024, 1024, 2), dtype=torch.uint8, device="cuda")
    pack, stream = KeptPack(buffer, 2), untyped.cuda.Stream()
    untyped.cuda._sleep(10_000_000)  # the write is not done when it is read
    pack.write(weight)
    with torch.cuda.stream(stream):
        copy = pack.read().clone()
    torch.cuda.synchronize()
    again = torch.zeros_like(buffer)
    ops._split_rows_out(weight, 2, again)
    assert torch.equal(copy, again)
