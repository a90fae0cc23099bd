"""``--random SEED``: series x drawn points -> times, checked before, measured again where they are below the bar.

With ``--short``: layers with a short K, each epilogue held to the time of the bare product.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cutlass
from benchmarks.baselines import BASELINES, FALLBACK, Alternative, Baseline
from benchmarks.cases import Case, Data, Parameters, Problem, Shape, compile_in_this_process, make_data, short
from benchmarks.cases import random as drawn
from benchmarks.cases.random import BETWEEN, DRAWN, Series
from benchmarks.harness.environment import gpu_folder
from benchmarks.harness.records import (
    ADDMM,
    COMPILE,
    EAGER,
    MM,
    OURS,
    OWN,
    PEERS,
    QUACK,
    CaseResult,
    Group,
    Measurement,
)
from benchmarks.harness.report import progress
from benchmarks.harness.runner import Bench, Budget, Ready, describe_error, matmul_precision, new_out
from benchmarks.harness.sampling import SampledReference
from benchmarks.harness.timing import Effort
from benchmarks.kinds import Run, points
from benchmarks.kinds.points import ours, size

NAMES = {"random": (EAGER, MM, ADDMM, COMPILE), "short": (EAGER, MM)}
EFFORT = Effort(rounds=5, min_ms=2.0, max_rounds=21)
"""11 calls of what takes 200 us, 21 of anything short, 5 of anything long."""
METHOD = (
    "Shapes drawn at random from the seed, none of them chosen. Medians of calls in turn, the L2 cache flushed before "
    "each call, the host ahead. The ratio is the time of the best baseline over ours: of eager and "
    "torch._addmm_activation, without the latter of eager and torch.compile, which runs at every fifth point. A point "
    "below its bar is measured twice more; the median of the three ratios counts. Every point counts in the geometric "
    "means. Where we or the best baseline take less than 10 us, no ratio is asked for, but to be at most 1 us behind."
)
SHORT_METHOD = (
    "Twenty layers of models, and shapes drawn at random from the seed. Ours is a Python function, decorated. Medians "
    "of calls in turn, the L2 cache flushed before each call, the host ahead. A point below a bar is measured twice "
    "more; the turn of the median ratio to torch.mm counts. The bare product is torch.mm alone; where the epilogue "
    f"reads a matrix, at least all bytes at 4.3 TB/s. With {short.WAVES} waves of 128 x 256 tiles or more: the "
    f"geometric mean of its time over ours is to be {short.GEOMEAN:g}, the worst {short.WORST:g}. Elsewhere we are to "
    f"be at most {short.MOST_BEHIND_US:g} us behind it. Eager is to be ahead by at most 2%, below 10 us by 1 us."
)
_COMPILE_EVERY = 5
_TIMES_EAGER = 2.0
_AGAIN, _PAUSE_S = 2, 0.2


@dataclass
class Drawing:
    """Measures series at drawn points on one device.

    Attributes:
        baselines: those that take part; ours are the series' own.
        budget: no point starts that would not end in time.
    """

    bench: Bench
    baselines: Sequence[Baseline]
    budget: Budget = field(default_factory=Budget)

    def measure(self, group: Sequence[Series], shapes: Sequence[Shape]) -> Iterator[CaseResult]:
        """Series that share their baselines, at all points."""
        bench, problem, setting = self.bench, group[0].problem, group[0].setting
        cases = [Case(problem, shape, setting) for shape in shapes]
        own = [BASELINES[name] for name in OWN if name in {series.own for series in group}]
        others = [b for b in self.baselines if b.name not in (*OWN, COMPILE)]
        compiled = [compiled_baseline(problem)] if any(b.name == COMPILE for b in self.baselines) else []
        for index, case in enumerate(self.budget.spend(cases, bench.device)):
            result = CaseResult.of(case)
            beside = [b for b in others if not b.applies(case, bench.device)]
            beside += compiled if index % _COMPILE_EVERY == 0 else []
            with torch.no_grad(), matmul_precision(setting):
                self._measure(group, case, result, [*own, *beside])
            yield result

    def _measure(
        self, group: Sequence[Series], case: Case, result: CaseResult, chosen: Sequence[Baseline]
    ) -> None:
        bench = self.bench
        try:
            data = make_data(case, bench.device, bench.seed)
            data.refill(signed=True, seed=bench.seed + 1)
            out = new_out(case, bench.device)
            reference = SampledReference(case, data, bench.seed)
        except Exception as error:
            failed = Measurement(group[0].own, "epigemm", error=describe_error(error))
            result.groups.append(Group("turn 1", [failed]))
            return
        every = bench.prepare(case, data, out, chosen)
        for ready in every:
            # Others are not checked: to hold one against float64 costs as much as timing it.
            if ready.measurement.alternative in OWN:
                bench.check(reference, "signed", out, ready)
                _allow_fallback(reference, case, data, ready)
            # The median of three calls leaves out one first call. These two may take longer at their second, too: a
            # choice that is remembered, a pack that is made, shapes that become dynamic.
            if ready.alternative is not None and ready.measurement.alternative in (*OWN, COMPILE):
                ready.measurement.host_us = bench.timer.host_us(ready.alternative.run)
        self._take_turns(result, every)
        first = result.groups[0].us()
        for _ in range(_AGAIN if any(series.why_missed(case.shape, first) for series in group) else 0):
            time.sleep(_PAUSE_S)
            for ready in every:  # wakes the device
                if ready.timed:
                    ready.timed.run()
            self._take_turns(result, every)

    def _take_turns(self, result: CaseResult, every: Sequence[Ready]) -> None:
        self.bench.in_turn(every)
        name = f"turn {len(result.groups) + 1}"
        result.groups.append(Group(name, [replace(ready.measurement) for ready in every]))


def _allow_fallback(reference: SampledReference, case: Case, data: Data, ready: Ready) -> None:
    """Where PyTorch's GEMM made a result that left its bound: right if its error is at most twice eager's.

    The bound is that of float32 sums. PyTorch lets cuBLAS add up parts of K in 16 bits, for eager as well.
    """
    m = ready.measurement
    if ready.alternative is None or not m.why_wrong or m.kernel != FALLBACK:
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


def folder(output: Path | None, about: Mapping[str, Any], name: str) -> Path:
    """Where a record goes: below ``output``, else below benchmarks/results/GPU."""
    return (output or Path("benchmarks") / "results" / gpu_folder(about)) / name


def _chosen(run: Run) -> tuple[Sequence[Series], dict[str, list[Shape]]]:
    """The series, and their shapes, by what a series calls them."""
    options, seed = run.options, run.options.random
    if options.short:
        of_models = {short.OF_MODELS: list(short.LAYERS.values())}
        chosen = short.select(options.cases, run.multiprocessors, options.count)
        return chosen, {DRAWN: short.draw(seed, options.count), **of_models}
    series = drawn.select(options.cases, count=options.count, between=options.between)
    return series, {DRAWN: drawn.draw(seed, options.count), BETWEEN: drawn.between(seed)}


def _summary(series: Series, results: Sequence[CaseResult]) -> dict[str, Any]:
    if isinstance(series, short.ShortSeries):
        return points.summarise_short(series, results)
    return points.summarise(series, results)


def main(run: Run) -> int:
    """Measure everything, kept after each group of series; 1 if a result of ours is wrong.

    Raises:
        ValueError: a pattern that matches nothing, or a baseline that is not there.
    """
    options, seed = run.options, run.options.random
    kind, method = ("short", SHORT_METHOD) if options.short else ("random", METHOD)
    chosen, shapes = _chosen(run)
    is_on_gpu = run.device.type == "cuda"
    among = [BASELINES[name] for name in (OURS, *NAMES[kind], QUACK)]
    # On a CPU, Inductor calls a C++ compiler for every case.
    available, absent = run.baselines([*among, cutlass.BASELINE], [] if is_on_gpu else [COMPILE])
    skipped = {s.name: drawn.NO_SLICES for s in chosen if s.on_slices and not is_on_gpu}
    together = drawn.groups([s for s in chosen if s.name not in skipped])
    drawing = Drawing(run.bench(EFFORT), available, Budget(run.budget))
    left_out = drawing.budget.left_out
    peers = [name for name in PEERS if name in options.peers]
    where = folder(options.output, run.about, peers[0] if peers else f"{kind}-{seed}")
    record = run.record(kind, method, dataclasses.asdict(EFFORT), where)
    record.absent = absent
    record.figures = {"seed": seed, "points": options.count, "between": options.between, "skipped": skipped}
    record.figures |= {"left_out": left_out, "cases": {}, "missed": []}
    found: dict[Series, list[CaseResult]] = {}
    if any(b.name == COMPILE for b in available):
        compile_in_this_process()
    told = progress(sum(len(shapes[group[0].shapes]) for group in together))
    for group in together:
        for result in drawing.measure(group, shapes[group[0].shapes]):
            record.results.append(result)
            told(result.case)
            for series in group:
                found.setdefault(series, []).append(result)
        cases = {series.name: _summary(series, of) for series, of in found.items()}
        missed = [f"{name}: {line}" for name, case in cases.items() for line in case["missed"]]
        record.figures |= {"cases": cases, "missed": missed if is_on_gpu else []}
        record.write()
    whys = [
        (f"{series.name} {size(r)}", ours(series, r).why_wrong) for series, of in found.items() for r in of
    ]
    wrong = [f"WRONG: {where}: {why}" for where, why in whys if why]
    reasons = list(left_out.values())
    remarks = wrong + [f"{reasons.count(why)} points: {why}" for why in dict.fromkeys(reasons)]
    remarks += [f"{name}: {why}" for name, why in skipped.items()]
    remarks += [f"missed: {line}" for line in record.figures["missed"]]
    cases = record.figures["cases"]
    summary = points.short_table(cases) if options.short else points.summary_table(cases)
    worst = [] if options.short else [points.worst_table(found)]
    record.finish([summary, *worst, *points.peer_tables(cases)], remarks)
    return bool(wrong)
