"""What fusion found: each site, what matched there, and what was left alone and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FusedSite:
    """One fused call.

    Attributes:
        name: the module and the node, as `encoder.mlp: fc1`.
        function: the function of epigemm that computes it.
        matched: the replaced nodes, as `fc1 (nn.Linear)`, in order.
        notes: why it ends where it ends, and when it runs unfused.
    """

    name: str
    function: str
    matched: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: epigemm.{self.function} for {' -> '.join(self.matched)}"]
        return "\n".join(lines + [f"    {note}" for note in self.notes])


@dataclass(frozen=True)
class Skipped:
    """Something that was left alone: a product, or a module that could not be looked into, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass
class FusionReport:
    """The sites of a model or a graph, and what was skipped; print it to read it.

    Attributes:
        sites: what was fused.
        skipped: what was left alone and why.
    """

    sites: list[FusedSite] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, other: FusionReport) -> None:
        """Take over what another report has and this one has not."""
        self.sites += [site for site in other.sites if site not in self.sites]
        self.skipped += [skipped for skipped in other.skipped if skipped not in self.skipped]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"fused {len(self.sites)} site{'' if len(self.sites) == 1 else 's'}"
        for site in self.sites:
            yield "  " + str(site).replace("\n", "\n  ")
        if self.skipped:
            yield f"left alone {len(self.skipped)}"
            yield from (f"  {skipped}" for skipped in self.skipped)
