"""The report of fusion: each fused call, and what was not fused, with reasons. `watch` does so for calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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


class Uncopied:
    """Base class of what belongs to a fused model, so that copies and pickles of it are plain models."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass
class CudaGraphs:
    """How `fuse(model, cuda_graphs=True)` runs a model's calls.

    Attributes:
        captured: how many graphs were captured, one for each size.
        reasons: why other calls run kernel by kernel.
    """

    captured: int = 0
    reasons: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The lines of the report."""
        yield f"CUDA graphs captured: {self.captured}"
        yield from (f"  kernel by kernel: {reason}" for reason in self.reasons)


@dataclass
class FusionReport(Uncopied):
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
        is_unsure: for a graph: whether it is not sure to be faster, so that the first calls run it and the original
            operators in turn.
        cuda_graphs: the CUDA graphs of calls; None if they were not asked for.
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
    """One line for equal entries of blocks that differ only by their numbers: `blocks.*.fc1 (12)`."""
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
    """Collect (product or model, reason) for everything that is not fused in the calls of fused models in the block.

    Calls of models that `torch.compile` made with the backend are not watched; see their reports.

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
    """Tell all `watch` blocks that something runs as PyTorch."""
    for seen in watchers:
        seen.append((name, reason))


def tell_skipped(report: FusionReport) -> None:
    """Tell all `watch` blocks what was not fused in a graph."""
    for skipped in report.skipped:
        tell(skipped.name, skipped.reason)
