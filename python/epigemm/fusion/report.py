"""What fusion found: each site, what was left alone and why. `watch` tells what fell back to PyTorch in calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FusedSite:
    """One fused call.

    Attributes:
        name: the product, as `encoder.mlp.fc1`.
        function: what it computes, in one word: `linear_gelu`.
        matched: the nodes of the graph that it replaces, in order.
        formula: what it computes.
        notes: why it ends where it ends.
    """

    name: str
    function: str
    matched: tuple[str, ...]
    formula: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """Something that was left alone: a product or a whole graph, and the reason."""

    name: str
    reason: str


class Uncopied:
    """What belongs to a fused model: copies and pickles of one are plain models."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass
class CudaGraphs:
    """What `fuse(model, cuda_graphs=True)` made of a model's calls.

    Attributes:
        captured: how many graphs were captured, one for each size.
        reasons: why other calls run kernel by kernel.
    """

    captured: int = 0
    reasons: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"CUDA graphs captured: {self.captured}"
        yield from (f"  kernel by kernel: {reason}" for reason in self.reasons)


@dataclass
class FusionReport(Uncopied):
    """The sites of a model or a graph, and what was skipped; print it to read it.

    Attributes:
        sites: what was fused.
        skipped: products that were left alone and why.
        notes: what holds for all of it.
        seconds: what the first calls took, compiling.
        chains: products that something pointwise follows, and how many of those are taken. Pointwise is what
            computes: no view, no idle dropout, no cast. It follows where it reads the product or a view of all
            of it, one in another order only where nothing else reads that. A chain is taken where the fused
            call computes at least the first such operator.
        not_taken: the others' products, each with the reason; an entry for each chain.
        is_unsure: of a graph: in the first calls it takes turns with the model's own operators, as it is not sure
            that it is faster.
        cuda_graphs: what became of calls as CUDA graphs; None where nobody asked for these.
    """

    sites: list[FusedSite] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    chains: tuple[int, int] = (0, 0)
    not_taken: list[Skipped] = field(default_factory=list)
    is_unsure: bool = False
    cuda_graphs: CudaGraphs | None = None

    def add(self, other: FusionReport) -> None:
        """Take over what another report has and this one has not."""
        self.sites += [site for site in other.sites if site not in self.sites]
        self.skipped += [skipped for skipped in other.skipped if skipped not in self.skipped]
        self.notes += [note for note in other.notes if note not in self.notes]
        self.seconds += other.seconds
        self.chains = (self.chains[0] + other.chains[0], self.chains[1] + other.chains[1])
        self.not_taken += other.not_taken

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        products = len(self.sites) + len(self.skipped)
        seconds = f"; compiled in {self.seconds:.1f} s" if self.seconds else ""
        yield f"{len(self.sites)} of {products} products fused{seconds}"
        yield from _folded(
            [
                (site.name, "\n      ".join([f"{site.function}: {site.formula}", *site.notes]))
                for site in self.sites
            ]
        )
        if self.skipped:
            yield f"left alone {len(self.skipped)}"
            yield from _folded([(skipped.name, skipped.reason) for skipped in self.skipped])
        if self.cuda_graphs is not None:
            yield from self.cuda_graphs.lines()
        yield from self.notes


def _folded(named: list[tuple[str, str]]) -> Iterator[str]:
    """Equal ones of blocks that differ by their numbers alone in one line: `blocks.*.fc1 (12)`."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, text in named:
        groups.setdefault((re.sub(r"\d+", "*", name), re.sub(r"_\d+\b", "", text)), []).append((name, text))
    for (pattern, _), members in groups.items():
        name, text = members[0]
        yield f"  {name if len(members) == 1 else f'{pattern} ({len(members)})'}: {text}"


# --- what ran without a fused kernel ----------------------------------------------------------------------------------

watchers: list[list[tuple[str, str]]] = []


@contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Collect (product or model, reason) for all that falls back to PyTorch in calls of fused models in the block.

    Calls of what `torch.compile` made with the backend are not seen: their reports tell.

    Example:
        >>> with epigemm.fusion.watch() as unfused:
        ...     model(x)
        >>> unfused
        []
    """
    seen: list[tuple[str, str]] = []
    watchers.append(seen)
    try:
        yield seen
    finally:
        watchers[:] = [each for each in watchers if each is not seen]


def tell(name: str, reason: str) -> None:
    """Tell whoever watches that something fell back to PyTorch."""
    for seen in watchers:
        seen.append((name, reason))


def tell_skipped(report: FusionReport) -> None:
    """Tell whoever watches what of a graph runs as it was."""
    for skipped in report.skipped:
        tell(skipped.name, skipped.reason)
