"""``--random SEED``: series x drawn points -> times, checked before, measured again where they are below the bar."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, FALLBACK, Alternative, Baseline
from benchmarks.cases import Case, Data, Parameters, Problem, Shape, compile_in_this_process
from benchmarks.cases import random as drawn
from benchmarks.cases.random import BARE, SMALL_US, Series
from benchmarks.harness.records import ADDMM, COMPILE, EAGER, OWN, CaseResult, Group, Measurement
from benchmarks.harness.report import Record, Table, finite
from benchmarks.harness.runner import (
    Bench,
    Budget,
    Inputs,
    Ready,
    close,
    describe_error,
    matmul_precision,
)
from benchmarks.harness.sampling import SampledReference
from benchmarks.kinds.points import Point, point_table, summarise, summary_table, worst_points
from epigemm.timing import Effort

KIND = "random"
RESULTS = Path("benchmarks") / "results"
NAMES = (EAGER, BARE, ADDMM, COMPILE)
EFFORT = Effort(rounds=5, min_ms=2.0, max_rounds=21, pause_s=None)
"""11 calls of what takes 200 us, 21 of anything short, 5 of anything long."""
METHOD = (
    "Shapes drawn at random from the seed, none of them chosen. Medians of calls in turn, the L2 cache flushed before "
    "each call, the host ahead. The ratio is the time of the best baseline over ours: of eager and "
    "torch._addmm_activation, without the latter of eager and torch.compile, which runs at every fifth point. A point "
    "below its bar is measured twice more; the median of the three ratios counts. Points at which we or the best "
    "baseline take less than 20 us are judged apart."
)
_COMPILE_EVERY = 5
_TIMES_EAGER = 2.0
_AGAIN, _PAUSE_S = 2, 0.2


@dataclass
class Drawing:
    """Measures series at drawn points on one device.

    Attributes:
        baselines: those of `NAMES` that take part; ours are the series' own.
        budget: no point starts that would not end in time.
    """

    bench: Bench
    baselines: Sequence[Baseline]
    budget: Budget = field(default_factory=Budget)

    def measure(
        self, group: Sequence[Series], shapes: Sequence[Shape]
    ) -> Iterator[tuple[CaseResult, list[Point]]]:
        """Series that share their baselines, at all points."""
        bench, problem, setting = self.bench, group[0].problem, group[0].setting
        cases = [Case(problem, shape, setting) for shape in shapes]
        cases = self.budget.with_room(cases, bench.device)
        inputs = Inputs(bench.device, cases, bench.seed)
        own = [BASELINES[name] for name in OWN if name in {series.own for series in group}]
        others = [_unchecked(b) for b in self.baselines if b.name not in (*OWN, COMPILE)]
        others = [b for b in others if cases and not b.applies(cases[0], bench.device)]
        compiled = [compiled_baseline(problem)] if any(b.name == COMPILE for b in self.baselines) else []
        for index, case in enumerate(self.budget.spend(cases)):
            result = CaseResult.of(case)
            sometimes = compiled if index % _COMPILE_EVERY == 0 else []
            with torch.no_grad(), matmul_precision(setting):
                self._measure(group, case, result, inputs, [*own, *others, *sometimes])
            bench.progress(case.name, True)
            yield result, [Point.of(series, case, result) for series in group]

    def _measure(
        self,
        group: Sequence[Series],
        case: Case,
        result: CaseResult,
        inputs: Inputs,
        chosen: Sequence[Baseline],
    ) -> None:
        bench = self.bench
        try:
            data, out = inputs.of(case)
            reference = SampledReference(case, data, bench.seed)
        except Exception as error:
            failed = Measurement(group[0].own, "epigemm", error=describe_error(error))
            result.groups.append(Group("turn 1", [failed]))
            return
        every = bench.prepare(case, data, out, chosen)
        for ready in every:
            if ready.alternative is not None and ready.alternative.checked:
                bench.check(reference, "signed", out, ready)
                _allow_fallback(reference, case, data, ready)
            # The median of three calls leaves out one first call. These two may take longer at their second, too: a
            # choice that is remembered, a pack that is made, shapes that become dynamic.
            if ready.alternative is not None and ready.measurement.alternative in (*OWN, COMPILE):
                ready.measurement.host_us = bench.timer.warm_up(ready.alternative.run)
        self._take_turns(result, every)
        first = {name: 1e3 * ms for name, ms in result.groups[0].ms().items()}
        for _ in range(_AGAIN if any(series.misses(first) for series in group) else 0):
            time.sleep(_PAUSE_S)
            for ready in every:  # wakes the device
                if ready.timed and ready.alternative is not None:
                    ready.alternative.run()
            self._take_turns(result, every)
        close(every)

    def _take_turns(self, result: CaseResult, every: Sequence[Ready]) -> None:
        self.bench.in_turn(every)
        name = f"turn {len(result.groups) + 1}"
        result.groups.append(Group(name, [replace(ready.measurement) for ready in every]))


def _allow_fallback(reference: SampledReference, case: Case, data: Data, ready: Ready) -> None:
    """Where PyTorch's GEMM made a result that left its bound: right if its error is at most twice eager's.

    The bound is that of float32 sums. PyTorch lets cuBLAS add up parts of K in 16 bits, for eager as well.
    """
    m = ready.measurement
    if ready.alternative is None or not m.wrong or m.kernel != FALLBACK:
        return
    eager = reference.compare(eager_result(case, data), ready.alternative.roundings)
    for kind, found in m.accuracy.items():
        is_right = (
            math.isfinite(found.relative_error)
            and found.relative_error <= _TIMES_EAGER * eager.relative_error
        )
        m.accuracy[kind] = replace(found, ok=is_right)


def eager_result(case: Case, data: Data) -> Tensor:
    """What eager PyTorch computes."""
    return case.problem.eager(data.x, data.weight, data.parameters)


def _unchecked(baseline: Baseline) -> Baseline:
    """The same, its results not held against float64: that costs as much as timing them."""

    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        return replace(baseline.prepare(case, data, out), checked=False)

    return replace(baseline, prepare=prepare)


def compiled_baseline(problem: Problem, backend: Any = "inductor") -> Baseline:
    """One compiled function for all shapes, as users get it: its sizes become dynamic at the second shape.

    The tensors are its arguments, and what was compiled for another case is forgotten.
    """
    torch.compiler.reset()

    def forward(x: Tensor, weight: Tensor, p: Parameters) -> Tensor:
        return problem.eager(x, weight, p)

    compiled: Any = torch.compile(forward, backend=backend)

    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        def run() -> Tensor:
            result: Tensor = compiled(data.x, data.weight, data.parameters)
            return result

        return Alternative(run, checked=False)

    return Baseline(COMPILE, "torch.compile", prepare)


def folder(output: Path | None, about: Mapping[str, Any], seed: int) -> Path:
    """Where a seed's record goes: below ``output``, else below benchmarks/results/GPU."""
    gpu = (about["gpu"] or {"name": "cpu"})["name"]
    return (output or RESULTS / re.sub("[^a-z0-9]+", "-", gpu.lower()).strip("-")) / f"random-{seed}"


@dataclass
class RandomRun:
    """A run of ``--random``: `skipped` says why a series is not measured here."""

    drawing: Drawing
    series: Sequence[Series]
    about: Mapping[str, Any]
    absent: Mapping[str, str]
    seed: int
    count: int
    between: bool
    skipped: dict[str, str] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Leave out what makes no sense on this device."""
        reasons = {s.name: drawn.why_skipped(s, self.drawing.bench.device) for s in self.series}
        self.skipped = {name: why for name, why in reasons.items() if why}
        self.series = [s for s in self.series if not reasons[s.name]]

    def shapes(self, series: Series) -> list[Shape]:
        """The points of a series."""
        return drawn.between(self.seed) if series.between else drawn.draw(self.seed, self.count)

    def measure(self, progress: Callable[[int], AbstractContextManager[Any]], target: Path) -> list[Path]:
        """Measure everything; the files, which are written after each group of series."""
        if any(b.name == COMPILE for b in self.drawing.baselines):
            compile_in_this_process()
        together = drawn.groups(self.series)
        with progress(sum(len(self.shapes(group[0])) for group in together)) as told:
            self.drawing.bench.progress = told
            for group in together:
                for result, points in self.drawing.measure(group, self.shapes(group[0])):
                    self.results.append(result)
                    self.points += points
                self.record().write(target)
        tables = [self.table(), point_table("The worst points of each case", worst_points(self.points))]
        return self.record(complete=True).write(target, tables, self.remarks())

    def record(self, *, complete: bool = False) -> Record:
        """What has been measured."""
        figures = {
            "seed": self.seed,
            "points": self.count,
            "between": self.between,
            "skipped": self.skipped,
            "left_out": self.drawing.budget.left_out,
            "cases": self.figures(),
        }
        effort = dataclasses.asdict(self.drawing.bench.effort)
        return Record(KIND, self.about, METHOD, effort, self.absent, self.results, figures, complete)

    def figures(self) -> dict[str, dict[str, Any]]:
        """The numbers of each series."""
        by_name = {s.name: [p for p in self.points if p.series.name == s.name] for s in self.series}
        return {name: finite(summarise(found)) for name, found in by_name.items() if found}

    def table(self) -> Table:
        """One row for each series."""
        return summary_table(self.figures())

    def tables(self) -> list[Table]:
        """The summary, and the points below the bar."""
        below = [point for point in self.points if point.below]
        return [self.table(), *([point_table("Below the bar", below)] if below else [])]

    def remarks(self) -> list[str]:
        """What is wrong, and what was not measured."""
        found = [f"WRONG: {p.series.name} {p.size}: {p.wrong}" for p in self.points if p.wrong]
        reasons = list(self.drawing.budget.left_out.values())
        found += [f"{reasons.count(why)} points: {why}" for why in dict.fromkeys(reasons)]
        return [*found, *self.record().remarks(), *(f"{name}: {why}" for name, why in self.skipped.items())]

    def list_table(self) -> Table:
        """The series, nothing measured."""
        rows = [
            [s.name, str(len(self.shapes(s))), f"{s.bar:g}", f"{s.small_bar or s.bar:g}"] for s in self.series
        ]
        return Table("cases", ("case", "points", "bar", f"under {SMALL_US:g} us"), rows)
