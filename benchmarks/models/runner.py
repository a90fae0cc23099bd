"""Models x batches x arithmetic -> records.

Each point is measured with what is quick to prepare, and some of them once more with what takes long to compile, with
eager and the fused model again beside it, because times may be divided only when they were measured in turn. What
matters most comes first: a run that ends early has lost the least.

**What is timed.** A call as its caller sees it: N calls back to back, from a device that has nothing to do until it is
done again, divided by N. Small batches are therefore measured by the host that launches them, as they are used; no CUDA
graph helps, unless the alternative is one. The cache holds what the calls before left there, which for a model is its
own end. The device's own time is taken apart, between events, the cache flushed and the host ahead.

**What is checked.** Every alternative's output (in training the gradients of all parameters, too) is compared with
float64, computed by the same model on the same, rounded parameters and inputs. Eager rounds once or more in every
layer, alternatives never at more than twice as many places (a product that is rounded before its bias is added), by no
more each: the error is at most twice eager's, but for chance, as the two are different samples of rounding. Their norms
over thousands of entries, of which a few layers decide, scatter by less than another factor of two. So four times
eager's error is allowed, and four roundings of the output where eager happens to be exact; of the largest entry, which
scatters more, eight times eager's. Beside what is compiled, the error of the same without fusion counts as eager's
does, if it is larger.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Setting
from benchmarks.harness.accuracy import UNIT_ROUNDOFF
from benchmarks.harness.records import EAGER, Timing
from benchmarks.harness.runner import describe_error, matmul_precision
from benchmarks.models import alternatives
from benchmarks.models.alternatives import GRAPHS, PREPARE, SLOW, Alternative, Results, Subject, gradients
from benchmarks.models.records import (
    FUSED,
    FUSED_WITH_PACKS,
    TITLES,
    UNFUSED,
    Error,
    ModelGroup,
    ModelMeasurement,
    ModelResult,
    Ratio,
)
from benchmarks.models.workloads import INFERENCE, MODES, TRAINING, Workload
from epigemm import fusion
from epigemm.timing import Effort, Run, Timer, make_timer

MAIN, COMPILING = "main", "compiling"
_EXPECTED_S = 8.0  # what Inductor takes before it is known
_MOST_HOST_US = 1300.0  # beyond it the host can not run ahead of a device that spins for 2 ms


@dataclass(frozen=True)
class ModelEffort:
    """How much to measure.

    Attributes:
        turns: of each alternative.
        turn_ms: at least so long a turn, unless it would take more calls than `most_calls`.
        most_calls: in a turn.
        device_calls: of each alternative, between events.
    """

    turns: int = 9
    turn_ms: float = 20.0
    most_calls: int = 50
    device_calls: int = 5


QUICK = ModelEffort(turns=3, turn_ms=1.0, most_calls=5, device_calls=3)


@dataclass(frozen=True)
class Point:
    """One model at one batch in one arithmetic, for inference or training."""

    workload: Workload[Any]
    batch: int
    setting: Setting
    mode: str

    @property
    def name(self) -> str:
        """Unique within a run."""
        return f"{self.workload.name} {self.batch} {self.setting} {self.mode}"


def points(
    workloads: Sequence[Workload[Any]], settings: Sequence[Setting], *, small: bool, batches: Sequence[int]
) -> list[Point]:
    """What is measured.

    Args:
        workloads: the models.
        settings: the arithmetic.
        small: the models' small sizes.
        batches: in place of the models' own; empty: those.
    """
    return [
        Point(workload, batch, setting, mode)
        for mode in MODES
        for setting in settings
        for workload in workloads
        if mode in workload.modes
        for batch in batches or (workload.small_batches if small else workload.batches)
    ]


def _rank(point: Point, group: str) -> float:
    """fp32 at torch's default before bf16 before TF32, inference before training; compiling a little later."""
    setting = 2 if point.setting.precision == "high" else int(point.setting.dtype_name != "fp32")
    return 2 * setting + int(point.mode == TRAINING) + (2.5 if group == COMPILING else 0.0)


def compiles(point: Point, *, small: bool) -> bool:
    """Whether a point is one of those at which models are compiled, too."""
    chosen = point.workload.compiled
    return chosen is not None and chosen[small] == point.batch and point.setting.precision == "highest"


def captures(point: Point, device: torch.device) -> bool:
    """Whether CUDA graphs are measured: where the host's time decides, at the smallest of several batches."""
    batches = point.workload.batches
    small = len(batches) > 1 and point.batch <= min(batches)
    return device.type == "cuda" and point.mode == INFERENCE and small


def allowed(eager: Error, dtype: torch.dtype) -> Error:
    """How far from float64 a result may be, given how far eager's is; derived in the module's docstring."""
    rounding = 4 * UNIT_ROUNDOFF[dtype]
    return Error(4 * eager.norm + rounding, 8 * eager.largest + rounding)


def distance(result: Sequence[Tensor], exact: Sequence[Tensor]) -> Error:
    """The distance between two lists of tensors, taken as one vector each.

    One, because gradients that vanish in exact arithmetic (of a bias ahead of BatchNorm) have no relative error.
    """
    square, exact_square, largest, exact_largest = 0.0, 0.0, 0.0, 0.0
    for mine, other in zip(result, exact, strict=True):
        error = mine.double().sub_(other) if mine.dtype != torch.float64 else mine - other
        square += float(error.square().sum())
        exact_square += float(other.square().sum())
        peak = float(error.abs().max())
        largest = peak if math.isnan(peak) else max(largest, peak)
        exact_largest = max(exact_largest, float(other.abs().max()))
        if math.isnan(largest):
            break
    if not exact_square:
        return Error(math.sqrt(square), largest)
    return Error(math.sqrt(square / exact_square), largest / exact_largest)


def turn(run: Run, calls: int, timer: Timer) -> float:
    """Milliseconds of one of so many calls, made back to back, the device idle before and after."""
    timer.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    timer.synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


@dataclass
class _Ready:
    """An alternative that gave a right result."""

    measurement: ModelMeasurement
    run: Run


@dataclass
class ModelRunner:
    """Measures points on one device.

    Attributes:
        device: where.
        names: which alternatives, eager among them.
        effort: how much to measure.
        compiler: what torch.compile compiles with.
        small: the models' small sizes.
        time_budget_s: what would probably take longer than what is left of it is left out; None: no limit.
        seed: of parameters and inputs.
        progress: told what is being done, and whether a step has just been finished.
        left_out: points and groups that were not measured, and why.
    """

    device: torch.device
    names: Sequence[str]
    effort: ModelEffort
    compiler: str = alternatives.INDUCTOR
    small: bool = False
    time_budget_s: float | None = None
    seed: int = 0
    progress: Callable[[str, bool], None] = lambda text, finished: None
    left_out: dict[str, str] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Allocate the timer's buffer once."""
        self._timer = make_timer(self.device)
        expected = _EXPECTED_S if self.compiler == alternatives.INDUCTOR else 0.0
        self._longest: dict[str, float] = dict.fromkeys(SLOW, expected)

    def schedule(self, chosen: Sequence[Point]) -> list[tuple[Point, str]]:
        """Each point with each of its groups, the important first."""
        slow = any(name in SLOW for name in self.names)
        compiled = [point for point in chosen if slow and compiles(point, small=self.small)]
        steps = [(point, MAIN) for point in chosen] + [(point, COMPILING) for point in compiled]
        return sorted(steps, key=lambda step: _rank(*step))

    def run(self, chosen: Sequence[Point]) -> Iterator[ModelResult]:
        """Measure; yields a point's record after each of its groups, as it now stands."""
        results: dict[str, ModelResult] = {}
        for point, group in self.schedule(chosen):
            names = self._names(point, group)
            # Less than the longest alternative and what has to be measured beside it would be no group.
            why = self._no_time(MAIN) or (self._no_time(names[-1]) if group == COMPILING else "")
            if why:
                self.left_out[f"{point.name}, {group}"] = why
                self.progress(f"{point.name}: left out", True)
                continue
            result = results.setdefault(point.name, self._result(point))
            self._measure_group(point, result, group, names)
            yield result

    def _names(self, point: Point, group: str) -> list[str]:
        if group == COMPILING:
            return [name for name in self.names if name in (EAGER, FUSED, *SLOW)]
        graphs = GRAPHS if captures(point, self.device) else ()
        # Pieces are made of fp32 alone, and kept where no gradient is asked for.
        keeps = point.setting.dtype_name == "fp32" and point.mode == INFERENCE and self.device.type == "cuda"
        packs = (FUSED_WITH_PACKS,) if keeps else ()
        return [name for name in self.names if name in (EAGER, FUSED, *packs, *graphs)]

    def _no_time(self, kind: str) -> str:
        """Why there is no time for one more of a kind, as long as the longest so far; empty where there is."""
        spent = time.monotonic() - self._started
        if self.time_budget_s is None or spent + self._longest.get(kind, 0.0) <= self.time_budget_s:
            return ""
        return f"left out: the time budget of {self.time_budget_s:g} s was spent"

    def _took(self, kind: str, since: float) -> float:
        seconds = time.monotonic() - since
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        return seconds

    def _result(self, point: Point) -> ModelResult:
        setting, workload = point.setting, point.workload
        return ModelResult(
            point.name,
            workload.name,
            workload.title,
            point.batch,
            setting.dtype_name,
            setting.precision,
            point.mode,
        )

    def _measure_group(self, point: Point, result: ModelResult, name: str, names: Sequence[str]) -> None:
        started = time.monotonic()
        group = ModelGroup(name)
        result.groups.append(group)
        try:
            with matmul_precision(point.setting), gradients(point.mode):
                self._measure(point, result, group, names)
        except Exception as error:
            group.measurements.append(ModelMeasurement(EAGER, TITLES[EAGER], error=describe_error(error)))
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._took(name, started)
        self.progress(point.name, True)

    def _measure(self, point: Point, result: ModelResult, group: ModelGroup, names: Sequence[str]) -> None:
        self.progress(f"{point.name}: float64", False)
        subject, exact = self._subject(point)
        result.parameters = sum(p.numel() for p in subject.model.parameters())
        ready: list[_Ready] = []
        errors: dict[str, Mapping[str, Error]] = {}
        for name in names:
            if name in SLOW and (why := self._no_time(name)):
                result.skipped[name] = why
                continue
            self.progress(f"{point.name}: {TITLES[name]}", False)
            measurement = ModelMeasurement(name, TITLES[name])
            group.measurements.append(measurement)
            run = self._prepare(subject, exact, measurement)
            errors[name] = measurement.errors
            if not errors[names[0]]:  # nothing to compare with
                return
            if not measurement.error:
                # What Inductor makes of the rest of a model errs at other places than eager.
                unfused = errors.get(UNFUSED.get(name, names[0])) or errors[names[0]]
                reference = {key: errors[names[0]][key].or_larger(unfused[key]) for key in measurement.errors}
                measurement.wrong = why_wrong(measurement.errors, reference, point.setting.dtype)
            if run is not None and not measurement.wrong:
                ready.append(_Ready(measurement, run))
        del exact
        self.progress(f"{point.name}: timing", False)
        self._time(ready)

    def _subject(self, point: Point) -> tuple[Subject, Results]:
        workload, dtype = point.workload, point.setting.dtype
        model = workload.model(small=self.small, device=self.device, seed=self.seed)
        drawn = workload.inputs(point.batch, small=self.small, device=self.device, seed=self.seed)
        model = model.to(dtype).train(point.mode == TRAINING)
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in drawn)
        doubled = copy.deepcopy(model).double()
        upstream = None
        if point.mode == TRAINING:
            # In eval mode: the shape is the same, and running statistics stay what they are.
            with torch.no_grad():
                shape = copy.deepcopy(model).eval()(*inputs).shape
            generator = torch.Generator(device=self.device).manual_seed(self.seed + 1)
            upstream = torch.randn(shape, generator=generator, device=self.device).to(dtype)
        subject = Subject(model, inputs, upstream, self.compiler)
        return subject, subject.exact(doubled)

    def _prepare(self, subject: Subject, exact: Results, measurement: ModelMeasurement) -> Run | None:
        """Make the first call, and compare its results with float64's."""
        started = time.monotonic()
        try:
            alternative: Alternative = PREPARE[measurement.alternative](subject)
            results = subject.results(alternative.forward)
            self._timer.synchronize()
            measurement.prepare_s = self._took(measurement.alternative, started)
            measurement.errors = {name: distance(result, exact[name]) for name, result in results.items()}
            measurement.sites = alternative.sites()
            run = subject.run(alternative.forward)
            with fusion.watch() as unfused:
                run()
            measurement.unfused = dict(Counter(reason for _, reason in unfused))
            self._timer.synchronize()
        except Exception as error:
            measurement.error = describe_error(error)
            return None
        return run

    def _time(self, ready: Sequence[_Ready]) -> None:
        if not ready:
            return
        host_us = [self._timer.warm_up(r.run) for r in ready]
        typical = min(turn(r.run, 1, self._timer) for r in ready)
        calls = min(max(1, math.ceil(self.effort.turn_ms / max(typical, 1e-3))), self.effort.most_calls)
        samples: list[list[float]] = [[] for _ in ready]
        for number in range(self.effort.turns):
            for index in range(len(ready)):
                place = (index + number) % len(ready)
                samples[place].append(turn(ready[place].run, calls, self._timer))
        for r, times, host in zip(ready, samples, host_us, strict=True):
            r.measurement.wall, r.measurement.host_us = Timing.of(times), host
            r.measurement.times_faster = {
                other.measurement.alternative: Ratio.of(theirs, times)
                for other, theirs in zip(ready, samples, strict=True)
                if other is not r
            }
            base = UNFUSED.get(r.measurement.alternative)
            r.measurement.slower = base in r.measurement.times_faster and (
                r.measurement.times_faster[base].slower
            )
        if self.device.type == "cuda":
            self._time_on_device(ready)

    def _time_on_device(self, ready: Sequence[_Ready]) -> None:
        """Where the host can run ahead; elsewhere the device would wait for it between the events."""
        short = [r for r in ready if r.measurement.host_us <= _MOST_HOST_US]
        count = self.effort.device_calls
        effort = Effort(rounds=count, min_ms=0.0, max_rounds=count, pause_s=None)
        host_us = max((r.measurement.host_us for r in short), default=0.0)
        times = self._timer.in_turn([r.run for r in short], effort, host_us)
        for r, samples in zip(short, times, strict=True):
            r.measurement.device = Timing.of(samples)


def why_wrong(errors: Mapping[str, Error], eager: Mapping[str, Error], dtype: torch.dtype) -> str:
    """Which results are further from float64 than they may be, beside eager's; empty where none is."""
    parts: list[str] = []
    for name, error in errors.items():
        limit = allowed(eager[name], dtype)
        if not error.finite or error.norm > limit.norm or error.largest > limit.largest:
            norms = ", ".join(
                f"{key} {value:.3g} (allowed {dataclasses.asdict(limit)[key]:.3g})"
                for key, value in dataclasses.asdict(error).items()
            )
            parts.append(f"{name}: {norms}")
    return "; ".join(parts)
