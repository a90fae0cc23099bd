"""The report of fusion: each fused call, and what was not fused, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FusedSite:
    """One fused call.

    Attributes:
        name: the layer's name, as `encoder.mlp.fc1`.
        function: the name of what it computes: `linear_gelu`.
        matched: the nodes of the graph that it replaces, in order.
        formula: what it computes.
        notes: why the chain ends there.
    """

    name: str
    function: str
    matched: tuple[str, ...]
    formula: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A product or a whole graph that was not fused, and the reason."""

    name: str
    reason: str


@dataclass
class FusionReport:
    """The fused calls of a model or a graph, and what was not fused. Print it to read it.

    Attributes:
        sites: the fused calls.
        skipped: products that were not fused, with reasons.
        notes: notes about all of it.
        seconds: the time for compiling, during the first calls.
        chains: the number of products that a pointwise operator follows, and how many of these are taken. Views,
            dropout in eval mode and casts do not count as pointwise. An operator follows if it reads the product or a
            view of all of it; a view with reordered axes must have no other reader. A chain is taken if the fused call
            computes at least the first such operator.
        not_taken: the products of the other chains, each with the reason.
        settings: of a fused model: its mode and options, for `epigemm.explain`.
    """

    sites: list[FusedSite] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    chains: tuple[int, int] = (0, 0)
    not_taken: list[Skipped] = field(default_factory=list)
    settings: Any = field(default=None, repr=False, compare=False)

    # It belongs to a fused model: copies and pickles of that are plain models.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def add(self, other: FusionReport) -> None:
        """Add what another report has and this one does not."""
        self.sites += [site for site in other.sites if site not in self.sites]
        self.skipped += [skipped for skipped in other.skipped if skipped not in self.skipped]
        self.notes += [note for note in other.notes if note not in self.notes]
        self.seconds += other.seconds
        self.chains = (self.chains[0] + other.chains[0], self.chains[1] + other.chains[1])
        self.not_taken += other.not_taken

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        when = "; nothing is compiled before the first call" if self.settings else ""
        when = f"; compiled in {self.seconds:.1f} s" if self.seconds else when
        yield f"{len(self.sites)} of {len(self.sites) + len(self.skipped)} products fused{when}"
        yield from _folded(
            [
                (site.name, "\n      ".join([f"{site.function}: {site.formula}", *site.notes]))
                for site in self.sites
            ]
        )
        if self.skipped:
            yield f"left alone {len(self.skipped)}"
            yield from _folded([(skipped.name, skipped.reason) for skipped in self.skipped])
        yield from self.notes


def _folded(named: list[tuple[str, str]]) -> Iterator[str]:
    """One line for equal entries of blocks that differ only by their numbers: `blocks.*.mlp.0 (12)`."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, text in named:
        groups.setdefault((re.sub(r"\d+", "*", name), re.sub(r"_\d+\b", "", text)), []).append((name, text))
    for members in groups.values():
        parts = zip(*(re.split(r"(\d+)", name) for name, _ in members), strict=True)
        name = "".join(each[0] if len(set(each)) == 1 else "*" for each in parts)
        yield f"  {name}{f' ({len(members)})' if len(members) > 1 else ''}: {members[0][1]}"
