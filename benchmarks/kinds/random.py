"""``--random SEED``: series x drawn points -> times, checked before, measured again where they are below the bar."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, FALLBACK, Alternative, Baseline
from benchmarks.cases import Case, Data, Parameters, Problem, Shape, compile_in_this_process
from benchmarks.cases import random as drawn
from benchmarks.cases.random import BARE, Series
from benchmarks.harness.progress import shown_progress
from benchmarks.harness.records import ADDMM, COMPILE, EAGER, OURS, OWN, CaseResult, Group, Measurement
from benchmarks.harness.report import Record, finite
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
from benchmarks.kinds import Run
from benchmarks.kinds.points import Point, point_table, summarise, summary_table, worst_points
from epigemm.timing import Effort

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


def main(run: Run) -> int:
    """Measure everything, kept after each group of series; 1 if a result of ours is wrong."""
    options, seed, console = run.options, run.options.random, run.console
    # On a CPU, Inductor calls a C++ compiler for every case.
    skip = [COMPILE] if run.device.type == "cpu" and not options.peers else []
    available, absent = run.baselines([BASELINES[name] for name in (OURS, *NAMES)], skip)
    chosen = drawn.select(options.cases, count=options.count, between=options.between)
    reasons = {s.name: drawn.why_skipped(s, run.device) for s in chosen}
    skipped = {name: why for name, why in reasons.items() if why}
    together = drawn.groups([s for s in chosen if not reasons[s.name]])
    shapes = {False: drawn.draw(seed, options.count), True: drawn.between(seed)}
    drawing = Drawing(run.bench(EFFORT), available, Budget(run.budget))
    target = folder(options.output, run.about, seed)
    figures = {"seed": seed, "points": options.count, "between": options.between, "skipped": skipped}
    figures |= {"left_out": drawing.budget.left_out, "cases": {}}
    effort = dataclasses.asdict(drawing.bench.effort)
    record = Record("random", run.about, METHOD, effort, absent, [], figures)
    points: dict[str, list[Point]] = {}
    run.announce()
    if any(b.name == COMPILE for b in available):
        compile_in_this_process()
    with shown_progress(sum(len(shapes[group[0].between]) for group in together)) as drawing.bench.progress:
        for group in together:
            for result, found in drawing.measure(group, shapes[group[0].between]):
                record.results.append(result)
                for point in found:
                    points.setdefault(point.series.name, []).append(point)
            names = [series.name for series in chosen if series.name in points]
            figures["cases"] = {name: finite(summarise(points[name])) for name in names}
            record.write(target)
    record.complete = True
    every = [point for found in points.values() for point in found]
    wrong = [f"WRONG: {p.series.name} {p.size}: {p.wrong}" for p in every if p.wrong]
    left_out = list(drawing.budget.left_out.values())
    remarks = wrong + [f"{left_out.count(why)} points: {why}" for why in dict.fromkeys(left_out)]
    remarks += [*record.remarks(), *(f"{name}: {why}" for name, why in skipped.items())]
    tables = [
        summary_table(figures["cases"]),
        point_table("The worst points of each case", worst_points(every)),
    ]
    record.finish(console, target, tables, remarks)
    return bool(wrong)
