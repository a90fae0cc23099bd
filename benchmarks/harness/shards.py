"""A part of a long run: what is in it, and what its record says so that the records of all parts can be merged."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Shard:
    """One of several parts."""

    index: int  # from 1 on
    count: int  # of all parts

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`"2/3"`: the second of three.

        Raises:
            ValueError: no such text, or no such part.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"--shard: expected I/N with 1 <= I <= N, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def takes(self, name: str) -> bool:
        """Whether what has this name is in this part: by the name alone, so that parts of it are alike."""
        return zlib.crc32(name.encode()) % self.count == self.index - 1

    def part(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Every `count`-th of few items, whose neighbours take equally long."""
        return items[self.index - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(1, 1)


@dataclass(frozen=True)
class Selection:
    """What a shard has run, among what there is."""

    shard: str  # "2/3"
    chosen: int  # how many are in it
    of: int  # how many there are
    digest: str  # of the names of all

    @classmethod
    def of_names(cls, names: Iterable[str], shard: Shard, chosen: int) -> Selection:
        """Parts of the same names have one digest, in whatever order they were found."""
        every = sorted(names)
        digest = hashlib.sha256("\n".join(every).encode()).hexdigest()[:16]
        return cls(str(shard), chosen, len(every), digest)

    def to_json(self) -> dict[str, Any]:
        """As a record has it."""
        return asdict(self)


def complete(selections: Sequence[Selection]) -> None:
    """Check that these are all parts of one whole.

    Raises:
        ValueError: a part is missing, is there twice, or is of something else.
    """
    shards = [Shard.parse(each.shard) for each in selections]
    counts = {each.count for each in shards}
    wholes = {(each.of, each.digest) for each in selections}
    if len(counts) != 1 or len(wholes) != 1:
        raise ValueError(f"shards of different runs: {', '.join(map(str, shards))} of {sorted(wholes)}")
    indices, wanted = sorted(each.index for each in shards), list(range(1, counts.pop() + 1))
    if indices != wanted:
        raise ValueError(f"expected each of the shards {wanted} once, got {indices}")
    total = sum(each.chosen for each in selections)
    if total != selections[0].of:
        raise ValueError(f"the shards hold {total} of {selections[0].of}")
