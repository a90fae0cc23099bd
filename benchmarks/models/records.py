"""What was measured of whole models: plain data, ready to be written as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness.records import EAGER, Timing

FUSED, FUSED_WITH_PACKS, COMPILED = "fuse", "fuse_packs", "compile"
BACKEND = "backend"
GRAPH, FUSED_GRAPH = "graph", "fuse_graph"

TITLES = {
    EAGER: "eager",
    FUSED: "epigemm.fuse",
    FUSED_WITH_PACKS: "epigemm.fuse(keep_packs=True)",
    COMPILED: "torch.compile",
    BACKEND: 'torch.compile(backend="epigemm")',
    GRAPH: "CUDA graph of eager",
    FUSED_GRAPH: "CUDA graph of epigemm.fuse",
}
UNFUSED = {
    FUSED: EAGER,
    FUSED_WITH_PACKS: EAGER,
    BACKEND: COMPILED,
    FUSED_GRAPH: GRAPH,
}
"""Each of our alternatives, and the same without fusion: what it must not be slower than."""

_SLOWER = 0.99


@dataclass(frozen=True)
class Ratio:
    """How many times faster than another alternative, turn by turn: median and quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, theirs_ms: Sequence[float], ours_ms: Sequence[float]) -> Ratio:
        """Of times that were taken in the same turns."""
        quartiles = Timing.of([a / b for a, b in zip(theirs_ms, ours_ms, strict=True)])
        return cls(quartiles.median_ms, quartiles.q1_ms, quartiles.q3_ms)

    @property
    def slower(self) -> bool:
        """Slower by more than a hundredth, and in three turns of four."""
        return self.median < _SLOWER and self.q3 < 1.0


@dataclass(frozen=True)
class Error:
    """One result's distance from float64.

    Attributes:
        norm: Frobenius norm of the error over that of the exact result.
        largest: the largest error over the largest exact entry.
    """

    norm: float
    largest: float

    def or_larger(self, other: Error) -> Error:
        """The larger of two, by each measure."""
        return Error(max(self.norm, other.norm), max(self.largest, other.largest))

    @property
    def finite(self) -> bool:
        """Whether there is a distance at all: NaN has none."""
        return math.isfinite(self.norm) and math.isfinite(self.largest)


@dataclass
class ModelMeasurement:
    """One alternative at one point.

    Attributes:
        alternative: its name, and `title` what tables call it.
        wall: milliseconds of a call as its caller sees them, called back to back until the device is done.
        device: milliseconds on the device alone, cache flushed before each call; None where the host cannot run ahead.
        host_us: what a call keeps the host.
        times_faster: than each alternative of the group, by its name (above 1: faster).
        slower: our alternative is slower than the same without fusion.
        errors: of "output", and in training of "gradients", against float64.
        wrong: which of them are further from float64 than `runner.allowed` lets them be, with the numbers.
        sites: what was fused, by function.
        unfused: reasons why sites ran as they were, with how many sites.
        prepare_s: from the model to the end of its first call: tracing and compiling.
        error: why there is no measurement ("" otherwise).
    """

    alternative: str
    title: str
    wall: Timing | None = None
    device: Timing | None = None
    host_us: float = math.nan
    times_faster: dict[str, Ratio] = field(default_factory=dict)
    slower: bool = False
    errors: dict[str, Error] = field(default_factory=dict)
    wrong: str = ""
    sites: dict[str, int] = field(default_factory=dict)
    unfused: dict[str, int] = field(default_factory=dict)
    prepare_s: float = math.nan
    error: str = ""


@dataclass
class ModelGroup:
    """Alternatives measured in turn: only within a group are times divided."""

    name: str
    measurements: list[ModelMeasurement] = field(default_factory=list)


@dataclass
class ModelResult:
    """Everything measured at one point.

    Attributes:
        case: unique within a run.
        model: the workload's name; `title` what it is.
        batch: rows, samples or images.
        mode: "inference" or "training".
        parameters: how many the model has.
        skipped: alternative -> why it was left out.
    """

    case: str
    model: str
    title: str
    batch: int
    dtype: str
    precision: str
    mode: str
    parameters: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    groups: list[ModelGroup] = field(default_factory=list)

    def failed(self) -> list[ModelMeasurement]:
        """Measurements of ours and eager's that are wrong or did not run, though the same without fusion did."""
        found: list[ModelMeasurement] = []
        for group in self.groups:
            broken = {m.alternative for m in group.measurements if m.error}
            for m in group.measurements:
                ours = m.alternative in (EAGER, *UNFUSED)
                if ours and (m.wrong or (m.error and UNFUSED.get(m.alternative) not in broken)):
                    found.append(m)
        return found
