"""Cases x alternatives -> results: prepare, check against float64, time in turn, time alone.

No time is taken of a result that is wrong.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.baselines import Alternative, Baseline, poisoned
from benchmarks.cases import Case, Data, Setting, Shape, make_data
from benchmarks.harness.accuracy import Judge, Reference
from benchmarks.harness.records import BARE, EAGER, OURS, OWN, CaseResult, Group, Measurement, Timing
from epigemm.timing import Effort, Timer, make_timer

MAIN, SLOW = "main", "slow"
_UNIFORM, _SIGNED = "uniform", "signed"
_MEMORY_SHARE = 0.8


@contextmanager
def matmul_precision(setting: Setting) -> Iterator[None]:
    """Torch's fp32 matmul precision as the case asks, put back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting.precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe_error(error: Exception) -> str:
    """An exception in one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:300] if first else ''}"


def fitting(case: Case, device: torch.device) -> Case:
    """The case itself, or for an elementwise one on a small GPU the same with M halved until everything fits.

    Input, output and eager's temporaries are alive at once, six tensors at most.
    """
    if device.type != "cuda" or case.shape.k:
        return case
    free, _ = torch.cuda.mem_get_info(device)
    m = case.shape.m
    while m > 1 and 3 * case.bytes * m // case.shape.m > _MEMORY_SHARE * free:
        m //= 2
    return Case(case.problem, Shape(m, case.shape.n), case.setting, case.models if m == case.shape.m else ())


@dataclass
class Ready:
    """One alternative on its way through a group; ``alternative`` is None once it has failed."""

    measurement: Measurement
    alternative: Alternative | None

    @property
    def timed(self) -> bool:
        """Whether it is to be timed."""
        return self.alternative is not None and not self.measurement.wrong


@dataclass
class Bench:
    """The steps of a measurement on one device; `progress` is told what is done, and whether a step is finished."""

    device: torch.device
    effort: Effort
    seed: int = 0
    progress: Callable[[str, bool], None] = lambda text, finished: None

    def __post_init__(self) -> None:
        """Allocate the timer's flush buffer once."""
        self.timer: Timer = make_timer(self.device)

    def prepare(self, case: Case, data: Data, out: Tensor, chosen: Sequence[Baseline]) -> list[Ready]:
        """Bind and warm up each."""
        return [self._prepare(case, data, out, baseline) for baseline in chosen]

    def _prepare(self, case: Case, data: Data, out: Tensor, baseline: Baseline) -> Ready:
        measurement = Measurement(baseline.name, baseline.title)
        self.progress(f"{case.name}: preparing {baseline.title}", False)
        try:
            alternative = baseline.prepare(case, data, out)
            measurement.kernel = alternative.kernel
            measurement.host_us = self.timer.warm_up(alternative.run)
        except Exception as error:  # one alternative that fails must not take the others with it
            measurement.error = describe_error(error)
            return Ready(measurement, None)
        return Ready(measurement, alternative)

    def check(self, reference: Judge, kind: str, out: Tensor, ready: Ready) -> None:
        """Hold one result against its bound."""
        assert ready.alternative is not None
        try:
            result = poisoned(ready.alternative, out).run()
            ready.measurement.accuracy[kind] = reference.compare(result, ready.alternative.roundings)
        except Exception as error:
            ready.measurement.error = describe_error(error)
            ready.alternative.close()
            ready.alternative = None

    def check_all(self, case: Case, data: Data, out: Tensor, every: Sequence[Ready]) -> None:
        """Our own on signed and on uniform inputs, the others on uniform ones; x ends as it began."""
        self.progress(f"{case.name}: checking against float64", False)
        for kind, signed in ((_SIGNED, True), (_UNIFORM, False)):
            data.refill(signed, self.seed + 1)
            reference: Reference | None = None
            for ready in every:
                ours = ready.measurement.alternative in OWN
                if ready.alternative is None or not ready.alternative.checked or (signed and not ours):
                    continue
                reference = reference or Reference(case, data, self.seed)
                self.check(reference, kind, out, ready)

    def in_turn(self, every: Sequence[Ready]) -> None:
        """Times of all that are right, interleaved."""
        timed = [ready for ready in every if ready.timed]
        runs = [ready.alternative.run for ready in timed if ready.alternative is not None]
        host_us = max((ready.measurement.host_us for ready in timed), default=0.0)
        for ready, samples in zip(timed, self.timer.in_turn(runs, self.effort, host_us), strict=True):
            ready.measurement.in_turn = Timing.of(samples)

    def alone(self, every: Sequence[Ready]) -> None:
        """Times of each by itself after a pause."""
        for ready in every:
            m = ready.measurement
            if not ready.timed or ready.alternative is None or m.in_turn is None:
                continue
            typical = m.in_turn.median_ms
            samples = self.timer.alone(ready.alternative.run, self.effort, typical, m.host_us)
            m.alone = Timing.of(samples)


def close(every: Sequence[Ready]) -> None:
    """Free what the alternatives hold."""
    for ready in every:
        if ready.alternative is not None:
            ready.alternative.close()


@dataclass
class Runner:
    """Runs cases, first with the baselines that are quick to prepare, then with the slow ones.

    Attributes:
        bench: where and how much.
        baselines: those that this machine has, ours first.
        budget_s: no slow baseline starts after so many seconds; None means no limit.
        limits_all: no case starts after them either.
    """

    bench: Bench
    baselines: Sequence[Baseline]
    budget_s: float | None = None
    limits_all: bool = False
    _started: float = field(default_factory=time.monotonic)

    def steps(self, cases: Sequence[Case]) -> int:
        """How many steps the progress display will see."""
        return len(cases) + sum(1 for case in cases if self._slow(case))

    def run(self, cases: Sequence[Case]) -> Iterator[CaseResult]:
        """Measure; after each group yields the case's record as it now stands."""
        results: list[tuple[Case, CaseResult]] = []
        quick = [b for b in self.baselines if not self._is_slow(b)]
        for case in cases:
            case = fitting(case, self.bench.device)
            result = CaseResult.of(case)
            if self.limits_all and self._out_of_time():
                self._leave_out(case, result, self.baselines)
            else:
                results.append((case, result))
                self.add_group(case, result, MAIN, quick)
            yield result
        for case, result in results:
            slow = self._slow(case)
            if slow and self._out_of_time():
                self._leave_out(case, result, slow)
            elif slow:
                again = [b for b in self.baselines if b.name in (OURS, EAGER, *BARE)]
                self.add_group(case, result, SLOW, [*again, *slow])
                yield result

    def check(self, cases: Sequence[Case]) -> Iterator[CaseResult]:
        """Hold ours against float64 and time nothing."""
        ours = [baseline for baseline in self.baselines if baseline.name in OWN]
        for case in cases:
            result = CaseResult.of(case)
            self.add_group(case, result, "check", ours, timed=False)
            yield result

    def add_group(
        self,
        case: Case,
        result: CaseResult,
        name: str,
        baselines: Sequence[Baseline],
        *,
        timed: bool = True,
    ) -> None:
        """Measure some alternatives in turn with each other."""
        bench, group = self.bench, Group(name)
        reasons = {b.name: b.applies(case, bench.device) for b in baselines}
        result.skipped |= {name: why for name, why in reasons.items() if why}
        result.groups.append(group)
        with torch.no_grad(), matmul_precision(case.setting):
            try:
                data = make_data(case, bench.device, bench.seed)
                out = torch.empty(case.shape.m, case.shape.n, dtype=case.setting.dtype, device=bench.device)
            except Exception as error:
                group.measurements.append(Measurement(OURS, "epigemm", error=describe_error(error)))
                return
            every = bench.prepare(case, data, out, [b for b in baselines if not reasons[b.name]])
            group.measurements += [ready.measurement for ready in every]
            bench.check_all(case, data, out, every)
            if timed:
                bench.progress(f"{case.name}: timing", False)
                bench.in_turn(every)
                if bench.effort.pause_s is not None:
                    bench.alone(every)
            close(every)
        del data, out, every
        gc.collect()  # a case's memory goes before the next one allocates its own
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        bench.progress(case.name, True)

    def _is_slow(self, baseline: Baseline) -> bool:
        return self.bench.device.type in baseline.slow_on

    def _slow(self, case: Case) -> list[Baseline]:
        device = self.bench.device
        return [b for b in self.baselines if self._is_slow(b) and not b.applies(case, device)]

    def _out_of_time(self) -> bool:
        return self.budget_s is not None and time.monotonic() - self._started > self.budget_s

    def _leave_out(self, case: Case, result: CaseResult, baselines: Sequence[Baseline]) -> None:
        why = f"not run: the time budget of {self.budget_s:g} s was spent"
        result.skipped |= {baseline.name: why for baseline in baselines}
        self.bench.progress(f"{case.name}: left out", True)


@dataclass
class Budget:
    """Time and memory for many cases: `left_out` says why some are not measured."""

    seconds: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _cost: float = 0.0

    def with_room(self, cases: Sequence[Case], device: torch.device) -> list[Case]:
        """Those that fit into memory."""
        reasons = {case.name: why_no_room(case, device) for case in cases}
        self.left_out |= {name: f"not run: {why}" for name, why in reasons.items() if why}
        return [case for case in cases if not reasons[case.name]]

    def spend(self, cases: Sequence[Case]) -> Iterator[Case]:
        """One after another; none is begun that would not end in time, taking twice as long as the last."""
        for case in cases:
            began = time.monotonic()
            if self.seconds is not None and began - self._started + 2 * self._cost > self.seconds:
                self.left_out[case.name] = f"not run: the time budget of {self.seconds:g} s was spent"
                continue
            yield case
            self._cost = time.monotonic() - began


class Inputs:
    """Operands and result of many shapes, as views of memory that is drawn once per dtype.

    x is N(0, 1); weights and parameters are drawn as the problem set draws them, once for each layer.
    """

    def __init__(self, device: torch.device, cases: Sequence[Case], seed: int) -> None:
        self._device, self._cases, self._seed = device, cases, seed
        self._setting: Setting | None = None
        self._layer: tuple[object, ...] = ()
        self._x = self._out = torch.empty(0)
        self._data: Data | None = None

    def of(self, case: Case) -> tuple[Data, Tensor]:
        """The inputs of a case and a tensor for its result."""
        m, n, k = case.shape.m, case.shape.n, case.shape.k or 0
        if self._setting is None or self._setting.dtype != case.setting.dtype:
            self._draw(case.setting)
        layer = (case.problem.name, case.setting, n, k)
        if self._data is None or self._layer != layer:
            one_row = Case(case.problem, Shape(1, n, k), case.setting)
            self._data, self._layer = make_data(one_row, self._device, self._seed), layer
        data = Data(self._x[: m * k].view(m, k), self._data.weight, self._data.parameters)
        return data, self._out[: m * n].view(m, n)

    def _draw(self, setting: Setting) -> None:
        shapes = [case.shape for case in self._cases if case.setting.dtype == setting.dtype]
        self._setting, self._data = setting, None
        self._x = self._out = torch.empty(0)  # the old ones go before the new ones come
        generator = torch.Generator(self._device).manual_seed(self._seed + 1)
        self._x = torch.empty(max(s.m * (s.k or 0) for s in shapes), dtype=setting.dtype, device=self._device)
        self._x.normal_(generator=generator)
        self._out = torch.empty(max(s.m * s.n for s in shapes), dtype=setting.dtype, device=self._device)


def why_no_room(case: Case, device: torch.device) -> str:
    """Why a case does not fit into memory with its slices, results and eager's steps; empty where it does."""
    if device.type != "cuda":
        return ""
    m, n, k = case.shape.m, case.shape.n, case.shape.k or 0
    needed = (2 * m * k + 2 * n * k + 6 * m * n) * case.setting.dtype.itemsize
    available = _MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return "" if needed <= available else f"needs {needed / 1e9:.1f} GB of memory"
