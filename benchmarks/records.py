"""What was measured: plain data, ready to be written as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = "epigemm"
PLAIN = "epigemm_plain"
EAGER = "eager"
MAX_AUTOTUNE = "max_autotune"
BUILTIN = "builtin"
TRITON = "triton_tf32x3"
FP16_PRODUCT = "fp16_mm"
PASS = "pass_x"

OWN = (OURS, PLAIN)
BASELINES = ("mm", "copy")
YARDSTICKS = (FP16_PRODUCT, PASS)
NOT_PEERS = (*OWN, BUILTIN, *BASELINES, *YARDSTICKS)

BAR_EFFICIENCY = 0.95
"""How close to its yardsticks an fp32 call is asked to come."""


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


@dataclass(frozen=True)
class Memory:
    """Device memory of one call, in bytes.

    Attributes:
        peak: what a call had allocated at its height, beyond what was there before it and the result.
        asked: the same in bytes as they were asked for, before the allocator rounds them up.
        kept: what a first call leaves behind for later ones (a weight's pack), in bytes as asked for.
        predicted: the part of ``asked`` that follows from the layout of the pieces; None where no pieces are
            made. A fold of BatchNorm's vectors comes on top.
        predicted_kept: ``kept`` by that layout.
    """

    peak: int
    asked: int
    kept: int
    predicted: int | None = None
    predicted_kept: int | None = None


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
        memory: for fp32 products on a GPU: ours and eager's.
        error: why there is no measurement ("" otherwise).
    """

    alternative: str
    title: str
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    in_turn: Timing | None = None
    alone: Timing | None = None
    host_us: float = math.nan
    memory: Memory | None = None
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

    def bar(self, products: int, *, alone: bool = False) -> float | None:
        """Milliseconds that a call on fp16 pieces may take: (products + one pass over x) / 0.95.

        Both are measured in the same run, so that it holds whatever the clocks do: ``torch.mm`` on fp16
        tensors of the same size, and a copy of x. None where one of them is missing.
        """
        times: list[float] = []
        for name in YARDSTICKS:
            yardstick = self.find(name)
            timing = None if yardstick is None else yardstick.alone if alone else yardstick.in_turn
            if timing is None or not products:
                return None
            times.append(timing.median_ms)
        product, copy = times
        return (products * product + copy) / BAR_EFFICIENCY

    def times_bar(self, m: Measurement, products: int, *, alone: bool = False) -> float | None:
        """A measurement's time as a multiple of the bar (at most 1: met)."""
        bar, timing = self.bar(products, alone=alone), m.alone if alone else m.in_turn
        return None if bar is None or timing is None else timing.median_ms / bar


@dataclass
class CaseResult:
    """Everything measured on one case.

    Attributes:
        fp16_products: how many fp16 products an fp32 call on fp16 pieces costs: 3 at "highest", 1 at "high",
            0 for what is no fp32 product.
        plan: what our dispatcher says about this call ("fused", "tile", "why_not", ...), with the weight's
            pieces kept; empty where it has no say.
        plan_plain: the same where the weight is split at every call; fp32 products only.
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
    fp16_products: int = 0
    plan: dict[str, object] = field(default_factory=dict)
    plan_plain: dict[str, object] = field(default_factory=dict)
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
        ours = [m for g in self.groups for m in g.measurements if m.alternative in OWN]
        return [m for m in ours if m.wrong or m.error]


@dataclass
class Ceiling:
    """A measured limit of the machine: a large matrix product, or a large copy."""

    name: str
    value: float
    unit: str
    timing: Timing


@dataclass(frozen=True)
class PlanTiming:
    """One plan: what it is, its time, and how many times faster than the bare product it is.

    ``predicted_us`` is what the cost model expects, where it considers the plan.
    """

    tile_index: int
    tile: str
    cluster: str
    schedule: str
    raster: str
    swizzle: int
    dispatched: bool
    timing: Timing
    times_faster_than_mm: float
    accuracy: Accuracy
    predicted_us: float | None = None
    family: str = ""
    splits: int = 1


@dataclass
class PlanSweep:
    """All plans of one family of kernels on one case, right ones first, fastest first.

    Attributes:
        arithmetic: the family: a 16-bit dtype, "tf32", "split" or "scaled".
        why_not: why dispatch would take none of them ("" where it would).
        mm: the bare product in PyTorch.
        dispatched: dispatch's own choice.
        split_x: for fp16 pieces the part of every call that splits x, alone.
        refused: the plans that could not be launched, with the error.
    """

    case: str
    shape: tuple[int, ...]
    arithmetic: str
    why_not: str
    mm: Timing | None = None
    dispatched: Timing | None = None
    split_x: Timing | None = None
    plans: list[PlanTiming] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a plan gave a wrong result or none."""
        return bool(self.refused) or any(not plan.accuracy.ok for plan in self.plans)
