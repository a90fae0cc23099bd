"""fp32 calls that cannot allocate the memory for their slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import weight_slices
from epigemm.packs import weight_packs
from tests.support.pieces import Road, pack_size


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
