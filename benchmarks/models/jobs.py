"""What ``--models`` measures: cases, variants, and jobs, each of which is one ratio of one case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cases import matching
from benchmarks.models.registry import NETWORKS, PRECISIONS

INFERENCE, TRAINING = MODES = ("inference", "training")


@dataclass(frozen=True)
class Case:
    """A model at one precision, mode and batch."""

    network: str
    precision: str
    mode: str
    batch: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Case:
        """Of a record."""
        network, precision, mode, batch = name.split("/")
        return cls(network, precision, mode, tuple(map(int, batch.split("x"))))

    def __str__(self) -> str:
        return f"{self.network}/{self.precision}/{self.mode}/{'x'.join(map(str, self.batch))}"

    @property
    def is_large(self) -> bool:
        """At the larger of the network's batches."""
        return self.batch == NETWORKS[self.network].batches[-1]


@dataclass(frozen=True)
class Variant:
    """Two ways to call a model.

    Attributes:
        ratio: what the record calls the time of the first over that of the second.
        other: the first, without epigemm.
        own: the second, with it.
        modes: where it is measured.
    """

    ratio: str
    other: str
    own: str
    modes: tuple[str, ...] = MODES


VARIANTS = {
    "eager_options": Variant("eager_options_vs_eager", "eager", "eager_options"),
    "backend": Variant("backend_vs_compile", "compile", "backend"),
    "whole": Variant("backend_vs_eager", "eager", "whole"),
    "overhead": Variant("overhead_vs_compile", "compile_overhead", "backend_overhead", (INFERENCE,)),
}
RATIOS = tuple(variant.ratio for variant in VARIANTS.values())


@dataclass(frozen=True)
class Job:
    """One ratio of one case, which a process of its own measures."""

    case: Case
    name: str  # of the variant

    @property
    def variant(self) -> Variant:
        """Its variant."""
        return VARIANTS[self.name]

    def __str__(self) -> str:
        return f"{self.case}/{self.name}"


def cases(*, quick: bool) -> Iterator[Case]:
    """All of them. Training: no fp32_high, the large batch alone. Quick: batches of 2."""
    for mode in MODES:
        for name, network in NETWORKS.items():
            large = network.batches[-1]
            batches = [(2, *large[1:])] if quick else [large] if mode == TRAINING else network.batches[::-1]
            for batch in batches:
                for precision in PRECISIONS:
                    if mode == INFERENCE or precision != "fp32_high":
                        yield Case(name, precision, mode, batch)


def jobs(patterns: Sequence[str], variants: Sequence[str], *, quick: bool) -> list[Job]:
    """Those of the cases that patterns mean (see `matching`), variant by variant.

    Raises:
        ValueError: a pattern matches no case.
    """
    every = {str(case): case for case in cases(quick=quick)}
    chosen = [every[name] for name in matching(list(every), patterns, "with --models")]
    return [
        Job(case, name)
        for name in VARIANTS
        if name in variants
        for case in chosen
        if case.mode in VARIANTS[name].modes
    ]
