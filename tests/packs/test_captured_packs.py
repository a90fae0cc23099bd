"""Packs that a captured graph reads are made again in place before a replay would read old ones."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import Parameter

from epigemm.packs import weight_packs
from epigemm.packs.captured_packs import CapturedPacks
from tests.support.pieces import decode


def weights(count: int = 3) -> list[Parameter]:
    return [Parameter(torch.rand(16, 64)) for _ in range(count)]


def assert_packed(weight: Parameter, slices: int = 2) -> None:
    matrix = decode(weight_packs.kept(weight)[slices].buffer, 16, 64, slices)
    torch.testing.assert_close(matrix, weight.detach().double(), rtol=2.0**-10, atol=1e-6)


def test_without_packs_there_is_nothing_to_see() -> None:
    given = weights()
    packs = CapturedPacks(given)
    with torch.no_grad():
        given[0].add_(1)
    assert packs.are_current(given) and packs.are_current(weights())
    assert CapturedPacks([]).are_current([])


@pytest.mark.parametrize("slices", [1, 2])
def test_written_weights_are_packed_again_in_place(slices: int) -> None:
    given = weights()
    made = [weight_packs.keep(weight, slices) for weight in given[1:]]
    packs = CapturedPacks(given)
    assert all(pack.frozen for pack in made)
    addresses = [pack.buffer.data_ptr() for pack in made]
    for _ in range(2):
        with torch.no_grad():
            given[2].mul_(-3)
        assert not made[1].is_current(given[2])
        assert packs.are_current(given)
        assert made[1].is_current(given[2])
        assert_packed(given[2], slices)
    assert [weight_packs.kept(weight)[slices].buffer.data_ptr() for weight in given[1:]] == addresses


def test_expired_packs_are_made_again() -> None:
    """A fused optimiser writes without a new version."""
    given = weights(1)
    weight_packs.keep(given[0], 2)
    packs = CapturedPacks(given)
    given[0].data.mul_(2)
    weight_packs.expire(given[0])
    assert packs.are_current(given)
    assert_packed(given[0])


def test_repacked_on_purpose() -> None:
    given = weights(1)
    weight_packs.keep(given[0], 2)
    packs = CapturedPacks(given)
    given[0].data.mul_(2)
    weight_packs.keep(given[0], 2, rewrite=True)
    assert packs.are_current(given)
    assert_packed(given[0])


@pytest.mark.parametrize("change", ["drop", "other"])
def test_packs_that_are_gone(change: str) -> None:
    given = weights(2)
    for weight in given:
        weight_packs.keep(weight, 2)
    packs = CapturedPacks(given)
    if change == "drop":
        weight_packs.drop(given[0])
        with torch.no_grad():
            given[0].add_(1)
    else:
        given[0] = Parameter(given[0].data)
        gc.collect()
    assert not packs.are_current(given)
