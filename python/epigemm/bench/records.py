"""What was measured: plain data, ready to be written as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = "epigemm"
EAGER = "eager"
BASELINES = ("mm", "copy")


@dataclass(frozen=True)
class Accuracy:
    """One result against float64.

    Attributes:
        ok: every checked element lies within its bound.
        wrong_elements: how many do not (NaN counts).
        fraction_of_bound: the largest |error| / bound; at most 1 when ok.
        error_at_worst: |error| of that element.
        bound_at_worst: the derived bound of that element.
        relative_error: Frobenius norm of the error over that of the reference.
        checked_columns: how many output columns were compared.
        problem: why nothing could be compared ("" otherwise).
    """

    ok: bool
    wrong_elements: int
    fraction_of_bound: float
    error_at_worst: float
    bound_at_worst: float
    relative_error: float
    checked_columns: int
    problem: str = ""

    @classmethod
    def wrong(cls, problem: str) -> Accuracy:
        """A result that cannot even be compared."""
        return cls(False, 0, math.inf, math.inf, 0.0, math.inf, 0, problem)


@dataclass(frozen=True)
class Timing:
    """Times of single calls in milliseconds: median, quartiles, minimum, and how many calls."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    min_ms: float
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Median and quartiles of the samples (at least one)."""
        ordered = sorted(samples_ms)
        if len(ordered) > 1:
            q1, median, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
        else:
            q1 = median = q3 = ordered[0]
        return cls(median, q1, q3, ordered[0], len(ordered))

    @property
    def spread(self) -> float:
        """Interquartile range as a fraction of the median."""
        return (self.q3_ms - self.q1_ms) / self.median_ms


@dataclass
class Measurement:
    """One alternative on one case.

    Attributes:
        alternative: the peer's name ("epigemm" is ours).
        title: how tables call it.
        accuracy: per kind of input ("uniform", "signed"); empty for what computes something else, like
            the bare product.
        in_turn: all alternatives interleaved, cache flushed before each call.
        alone: this one by itself after a pause.
        host_us: what the call costs the host until it returns, in microseconds.
        error: why there is no measurement ("" otherwise).
    """

    alternative: str
    title: str
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    in_turn: Timing | None = None
    alone: Timing | None = None
    host_us: float = math.nan
    error: str = ""

    @property
    def wrong(self) -> bool:
        """Whether a result left its bound."""
        return any(not accuracy.ok for accuracy in self.accuracy.values())


@dataclass
class Group:
    """Alternatives measured in turn with each other: only within a group may times be divided."""

    name: str
    measurements: list[Measurement] = field(default_factory=list)

    def find(self, *alternatives: str) -> Measurement | None:
        """The first measurement of one of these alternatives that has a time."""
        for measurement in self.measurements:
            if measurement.alternative in alternatives and measurement.in_turn is not None:
                return measurement
        return None

    def ratio(self, measurement: Measurement, *denominators: str, alone: bool = False) -> float | None:
        """How many times faster than another alternative (above 1: faster); None where a time is missing."""
        other = self.find(*denominators)
        ours = measurement.alone if alone else measurement.in_turn
        theirs = None if other is None else other.alone if alone else other.in_turn
        return None if ours is None or theirs is None else theirs.median_ms / ours.median_ms


@dataclass
class CaseResult:
    """Everything measured on one case.

    Attributes:
        plan: what our dispatcher says about this call ("fused", "tile", "why_not", ...); empty where it has
            no say.
        skipped: alternative -> why it takes no part in this case.
    """

    case: str
    problem: str
    models: tuple[str, ...]
    formula: str
    shape: tuple[int, ...]
    dtype: str
    precision: str
    training: bool
    flops: int
    bytes: int
    plan: dict[str, object] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[Group, Measurement]]:
        """Each alternative once, with the group whose times its ratios refer to."""
        seen: dict[str, tuple[Group, Measurement]] = {}
        for group in self.groups:
            for measurement in group.measurements:
                seen.setdefault(measurement.alternative, (group, measurement))
        return list(seen.values())

    def failed(self) -> list[Measurement]:
        """Our own measurements that are wrong or did not run."""
        ours = [m for g in self.groups for m in g.measurements if m.alternative == OURS]
        return [m for m in ours if m.wrong or m.error]


@dataclass
class Ceiling:
    """A measured limit of the machine: a large matrix product, or a large copy."""

    name: str
    value: float
    unit: str
    timing: Timing
