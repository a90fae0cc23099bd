"""What was measured: plain data. A record is an environment and cases; a case has groups of alternatives.

Only within a group, whose alternatives took turns in one process, may times be divided. `Ratio` says which quotients a
record's summary holds, and what is wanted of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cases import Case

OURS, PLAIN, BUILTIN = "epigemm", "epigemm_plain", "builtin"
EAGER, COMPILE, MAX_AUTOTUNE, ADDMM = "eager", "compile", "max_autotune", "addmm_activation"
QUACK, MM, COPY = "quack", "mm", "copy"
OWN = (OURS, PLAIN, BUILTIN)
BARE = (MM, COPY)
"""The product alone, or a copy: what computes less."""
NOT_BASELINES = (*OWN, *BARE)


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


@dataclass
class Measurement:
    """One alternative on one case.

    Attributes:
        alternative: its name ("epigemm" is ours).
        title: how tables call it.
        kernel: of ours: what the call launches.
        accuracy: per kind of input ("uniform", "signed"); empty for what computes something else.
        in_turn: all alternatives interleaved, cache flushed before each call.
        alone: this one by itself after a pause.
        host_us: what the call costs the host until it returns, in microseconds.
        error: why there is no measurement ("" otherwise).
    """

    alternative: str
    title: str
    kernel: str = ""
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    in_turn: Timing | None = None
    alone: Timing | None = None
    host_us: float = math.nan
    error: str = ""

    @property
    def wrong(self) -> bool:
        """Whether a result left its bound."""
        return any(not accuracy.ok for accuracy in self.accuracy.values())

    @property
    def why_wrong(self) -> str:
        """Why there is no figure; empty where there is one."""
        if self.error or not self.wrong:
            return self.error
        worst = max(self.accuracy.values(), key=lambda accuracy: accuracy.fraction_of_bound)
        return worst.problem or f"{worst.wrong_elements} elements, {worst.fraction_of_bound:.3g} of the bound"

    def ms(self, *, alone: bool = False) -> float | None:
        """The median."""
        timing = self.alone if alone else self.in_turn
        return None if timing is None else timing.median_ms


@dataclass
class Group:
    """Alternatives measured in turn with each other."""

    name: str
    measurements: list[Measurement] = field(default_factory=list)

    def ms(self, *, alone: bool = False) -> dict[str, float]:
        """The medians of those that have one."""
        found = ((m.alternative, m.ms(alone=alone)) for m in self.measurements)
        return {name: ms for name, ms in found if ms is not None}


@dataclass
class CaseResult:
    """Everything measured on one case.

    Attributes:
        skipped: alternative -> why it takes no part in this case.
    """

    case: str
    problem: str
    models: tuple[str, ...]
    formula: str
    shape: tuple[int, ...]
    dtype: str
    precision: str
    flops: int
    bytes: int
    skipped: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case) -> CaseResult:
        """The record of a case before anything is measured."""
        shape, setting = case.shape, case.setting
        return cls(
            case=case.name,
            problem=case.problem.name,
            models=case.models,
            formula=case.problem.formula,
            shape=(shape.m, shape.n) if shape.k is None else (shape.m, shape.n, shape.k),
            dtype=setting.dtype_name,
            precision=setting.precision if setting.dtype_name == "fp32" else "",
            flops=case.flops,
            bytes=case.bytes,
        )

    @property
    def size(self) -> str:
        """MxNxK."""
        return "x".join(map(str, self.shape))

    @property
    def measurements(self) -> dict[str, Measurement]:
        """Each alternative once, from the first group that has it."""
        found: dict[str, Measurement] = {}
        for group in self.groups:
            for measurement in group.measurements:
                found.setdefault(measurement.alternative, measurement)
        return found

    def failed(self) -> list[Measurement]:
        """Our own measurements that are wrong or did not run."""
        ours = [m for g in self.groups for m in g.measurements if m.alternative in OWN]
        return [m for m in ours if m.wrong or m.error]

    def times(self, *, alone: bool = False) -> dict[str, float]:
        """Median milliseconds of each alternative, from the first group that has them."""
        return {name: ms for group in reversed(self.groups) for name, ms in group.ms(alone=alone).items()}


@dataclass(frozen=True)
class Ratio:
    """The time of others over ours: above 1 ours is faster.

    Attributes:
        key: its name in a summary.
        others: the best of these; empty: of all that compute the same.
        own: which call of ours.
        alone: each after a pause, not in turn.
        dtypes: in which; empty: in all.
        least: what is wanted of it.
    """

    key: str
    others: tuple[str, ...] = ()
    own: str = OURS
    alone: bool = False
    dtypes: tuple[str, ...] = ()
    least: float | None = None

    def best(self, result: CaseResult) -> tuple[float, str] | None:
        """The ratio and the name of the best of the others, each in its first group; None where a time is missing."""
        if self.dtypes and result.dtype not in self.dtypes:
            return None
        found: dict[str, float] = {}
        for group in result.groups:
            times = group.ms(alone=self.alone)
            others = self.others or [name for name in times if name not in NOT_BASELINES]
            for name in others if self.own in times else ():
                if name in times:
                    found.setdefault(name, times[name] / times[self.own])
        return min(((ratio, name) for name, ratio in found.items()), default=None)


def ratios(result: CaseResult, wanted: Sequence[Ratio]) -> dict[str, float]:
    """The figures of one case, as far as there are any."""
    found = {ratio.key: ratio.best(result) for ratio in wanted}
    return {key: round(best[0], 4) for key, best in found.items() if best is not None}


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def not_run(results: Sequence[CaseResult]) -> dict[str, dict[str, list[str]]]:
    """By alternative and reason, the cases without its time."""
    found: dict[str, dict[str, list[str]]] = {}
    for result in results:
        reasons = dict(result.skipped)
        for m in result.measurements.values():
            if m.why_wrong:
                reasons[m.alternative] = m.error or "further from float64 than its bound: not timed"
        for name, why in reasons.items():
            if name in NOT_BASELINES and not why.startswith("not run:"):
                continue
            found.setdefault(name, {}).setdefault(why, []).append(result.case)
    return found
