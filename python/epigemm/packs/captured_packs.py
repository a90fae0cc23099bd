"""The packs that a captured CUDA graph reads. They are frozen, and made again in place before a replay if stale.

A call checks the version of its weight. A replay checks nothing, so the code that launches it does it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

from epigemm.packs import weight_packs
from epigemm.packs.kept_pack import KeptPack

_version, _mark = attrgetter("_version"), attrgetter("_mark")


class CapturedPacks:
    """The kept packs of some weights. Made before a capture."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._read: list[
            tuple[int, int, KeptPack]
        ] = []  # the weight's position, the number of slices, the pack
        for place, weight in enumerate(weights):
            for slices, pack in weight_packs.kept(weight).items():
                pack.frozen = True  # if stale, the graph splits the weight; made again in place later
                self._read.append((place, slices, pack))
        self._take: Any = itemgetter(0, *(place for place, *_ in self._read)) if self._read else None
        self._packs = [pack for *_, pack in self._read]
        self._seen = self._state(weights) if self._read else ()

    def are_current(self, weights: Sequence[Tensor]) -> bool:
        """Make packs again whose weights have changed; returns whether the graph reads the packs that are kept now."""
        if not self._read or self._state(weights) == self._seen:
            return True
        for place, slices, pack in self._read:
            weight = weights[place]
            if weight_packs.find(weight, slices) is not pack:
                return False
            if weight_packs.keep(weight, slices, frozen=True) is not pack:
                return False
        self._seen = self._state(weights)
        return True

    def _state(self, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        taken = self._take(weights)[1:]
        return [*map(id, taken)], [*map(_version, taken)], [*map(_mark, self._packs)]
