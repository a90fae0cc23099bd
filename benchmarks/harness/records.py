"""What was measured: plain data. A record is an environment and cases; a case has groups of alternatives.

Only within a group, whose alternatives took turns in one process, may times be divided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cases import Case
from epigemm.tuner.timing import Late

OURS, PLAIN, BUILTIN = "epigemm", "epigemm_plain", "builtin"
EAGER, COMPILE, MAX_AUTOTUNE, ADDMM = "eager", "compile", "max_autotune", "addmm_activation"
QUACK, CUTLASS, MM, COPY = "quack", "cutlass", "mm", "copy"
OWN = (OURS, PLAIN, BUILTIN)
BARE = (MM, COPY)
"""The product alone, or a copy: what computes less. So does CUTLASS's."""
PEERS = (QUACK, CUTLASS)
NOT_BASELINES = (*OWN, *BARE, CUTLASS)


@dataclass(frozen=True)
class Accuracy:
    """One result against float64.

    Attributes:
        ok: every checked element lies within its bound.
        wrong_elements: how many do not (NaN counts).
        fraction_of_bound: the largest |error| / bound; at most 1 when ok.
        relative_error: Frobenius norm of the error over that of the reference.
        checked_columns: how many output columns were compared.
        problem: why nothing could be compared ("" otherwise).
    """

    ok: bool
    wrong_elements: int
    fraction_of_bound: float
    relative_error: float
    checked_columns: int
    problem: str = ""

    @classmethod
    def wrong(cls, problem: str) -> Accuracy:
        """A result that cannot even be compared."""
        return cls(False, 0, math.inf, math.inf, 0, problem)


@dataclass(frozen=True)
class Timing:
    """Times of single calls in milliseconds: median, quartiles, minimum, how many calls, and how many `Late` ones."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    min_ms: float
    samples: int
    late: int = 0

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Median and quartiles of the samples (at least one)."""
        several = samples_ms if len(samples_ms) > 1 else [*samples_ms, *samples_ms]
        q1, median, q3 = statistics.quantiles(several, method="inclusive")
        late = sum(isinstance(each, Late) for each in samples_ms)
        return cls(median, q1, q3, min(samples_ms), len(samples_ms), late)


@dataclass
class Measurement:
    """One alternative on one case.

    Attributes:
        alternative: its name ("epigemm" is ours).
        title: how tables call it.
        kernel: of ours: what the call launches.
        accuracy: per kind of input ("uniform", "signed"); empty for what computes something else.
        in_turn: all alternatives interleaved, cache flushed before each call.
        host_us: what the call costs the host until it returns, in microseconds.
        error: why there is no measurement ("" otherwise).
    """

    alternative: str
    title: str
    kernel: str = ""
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    in_turn: Timing | None = None
    host_us: float = math.nan
    error: str = ""

    @property
    def why_wrong(self) -> str:
        """Why there is no figure: an exception, or a result that left its bound; empty where there is one."""
        wrong = [accuracy for accuracy in self.accuracy.values() if not accuracy.ok]
        if self.error or not wrong:
            return self.error
        worst = max(wrong, key=lambda accuracy: accuracy.fraction_of_bound)
        return worst.problem or f"{worst.wrong_elements} elements, {worst.fraction_of_bound:.3g} of the bound"


@dataclass
class Group:
    """Alternatives measured in turn with each other."""

    name: str
    measurements: list[Measurement] = field(default_factory=list)

    def ms(self) -> dict[str, float]:
        """The medians of those that have one."""
        return {m.alternative: m.in_turn.median_ms for m in self.measurements if m.in_turn is not None}

    def us(self) -> dict[str, float]:
        """The same in microseconds."""
        return {name: 1e3 * ms for name, ms in self.ms().items()}


@dataclass
class CaseResult:
    """Everything measured on one case.

    Attributes:
        skipped: alternative -> why it takes no part in this case.
        groups: of random shapes, one for each time that the alternatives took turns; else one.
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
    def measurements(self) -> dict[str, Measurement]:
        """Each alternative, from the first group."""
        return {m.alternative: m for group in self.groups[:1] for m in group.measurements}

    def times(self) -> dict[str, float]:
        """Median milliseconds of each alternative, from the first group."""
        return self.groups[0].ms() if self.groups else {}

    def failure(self) -> str:
        """Why our own measurements are wrong or missing; empty where they are there."""
        ours = [m for m in self.measurements.values() if m.alternative in OWN and m.why_wrong]
        return "; ".join(f"{m.title}: {m.why_wrong}" for m in ours)

    def ratio(self, others: Sequence[str] = (), own: str = OURS) -> float | None:
        """The time of the best of others (none named: of all that compute the same) over ours; None without both."""
        times = self.times()
        best = self.best(others)
        return round(times[best] / times[own], 4) if best and own in times else None

    def best(self, others: Sequence[str] = ()) -> str:
        """The fastest of others; empty where none has a time."""
        times = self.times()
        found = [name for name in times if (name in others if others else name not in NOT_BASELINES)]
        return min(found, key=times.__getitem__, default="")


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return statistics.geometric_mean(values) if values else None


def not_run(results: Sequence[CaseResult]) -> dict[str, dict[str, list[str]]]:
    """By alternative and reason, the cases without its time."""
    found: dict[str, dict[str, list[str]]] = {}
    for result in results:
        reasons = dict(result.skipped)
        for m in result.measurements.values():
            if m.why_wrong:
                reasons[m.alternative] = m.error or "further from float64 than its bound: not timed"
        for name, why in reasons.items():
            if name not in NOT_BASELINES or why.startswith("not run:"):
                found.setdefault(name, {}).setdefault(why, []).append(result.case)
    return found
