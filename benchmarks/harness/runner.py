"""A case and alternatives -> measurements: prepare, check against float64, time in turn.

No time is taken of a result that is wrong.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.baselines import Alternative, Baseline
from benchmarks.cases import GLU, Case, Data, Setting, Shape, make_data
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.pairs import PairReference
from benchmarks.harness.records import OURS, OWN, Accuracy, CaseResult, Group, Measurement, Timing
from benchmarks.harness.timing import Effort, in_turn, make_timer
from epigemm.tuner.timing import Timer

_MEMORY_SHARE = 0.8


class Judge(Protocol):
    """What results are held against: a float64 result and the bound around it."""

    def compare(self, out: Tensor, intermediate_roundings: int) -> Accuracy:
        """Hold one result against it."""


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


def why_no_room(case: Case, device: torch.device) -> str:
    """Why a product does not fit into memory with its slices, results and eager's steps; empty where it does."""
    if device.type != "cuda":
        return ""
    m, n, k = case.shape.m, case.shape.n, case.shape.k or 0
    needed = (2 * m * k + 2 * n * k + 6 * m * n) * case.setting.dtype.itemsize
    available = _MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return "" if needed <= available else f"not run: needs {needed / 1e9:.1f} GB of memory"


def new_out(case: Case, device: torch.device) -> Tensor:
    """For every alternative to write to."""
    return torch.empty(case.shape.m, case.columns, dtype=case.setting.dtype, device=device)


@dataclass
class Ready:
    """One alternative on its way through a group; ``alternative`` is None once it has failed."""

    measurement: Measurement
    alternative: Alternative | None

    @property
    def timed(self) -> Alternative | None:
        """It, unless its result is wrong."""
        return None if self.measurement.why_wrong else self.alternative


@dataclass
class Bench:
    """The steps of a measurement on one device."""

    device: torch.device
    effort: Effort
    seed: int = 0

    def __post_init__(self) -> None:
        """Allocate the timer's flush buffer once."""
        self.timer: Timer = make_timer(self.device)

    def measure(self, case: Case, chosen: Sequence[Baseline], result: CaseResult) -> None:
        """Some alternatives of a case, in turn with each other: ours checked on signed and on uniform inputs."""
        result.groups.append(Group("main"))
        with torch.no_grad(), matmul_precision(case.setting):
            try:
                data = make_data(case, self.device, self.seed)
                out = new_out(case, self.device)
            except Exception as error:
                failed = Measurement(OURS, "epigemm", error=describe_error(error))
                result.groups[0].measurements.append(failed)
                return
            every = self.prepare(case, data, out, chosen)
            result.groups[0].measurements += [ready.measurement for ready in every]
            for kind, signed in (("signed", True), ("uniform", False)):  # x ends as it began
                data.refill(signed, self.seed + 1)
                of = PairReference if case.problem.kind == GLU else Reference
                reference: Judge = of(case, data, self.seed)
                for ready in every:
                    if not signed or ready.measurement.alternative in OWN:
                        self.check(reference, kind, out, ready)
                del reference  # as large as all the rest, and not needed while time is taken
            self.in_turn(every)
        del data, out, every, ready
        gc.collect()  # a case's memory goes before the next one allocates its own
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, case: Case, data: Data, out: Tensor, chosen: Sequence[Baseline]) -> list[Ready]:
        """Bind and warm up each."""
        every = []
        for baseline in chosen:
            measurement, alternative = Measurement(baseline.name, baseline.title), None
            try:
                alternative = baseline.prepare(case, data, out)
                measurement.kernel = alternative.kernel
                measurement.host_us = self.timer.host_us(alternative.run)
            except Exception as error:  # one alternative that fails must not take the others with it
                measurement.error, alternative = describe_error(error), None
            every.append(Ready(measurement, alternative))
        return every

    def check(self, reference: Judge, kind: str, out: Tensor, ready: Ready) -> None:
        """Hold one result against its bound.

        ``out`` is filled with NaN first: whatever a call does not write then shows. So is what the allocator is likely
        to hand out for a result of the same size.
        """
        alternative, measurement = ready.alternative, ready.measurement
        if alternative is None or not alternative.checked:
            return
        try:
            out.fill_(float("nan"))
            torch.full_like(out, float("nan"))
            measurement.accuracy[kind] = reference.compare(alternative.run(), alternative.roundings)
        except Exception as error:
            measurement.error, ready.alternative = describe_error(error), None

    def in_turn(self, every: Sequence[Ready]) -> None:
        """Times of all that are right, interleaved."""
        timed = [(ready.measurement, ready.timed.run) for ready in every if ready.timed]
        host_us = max((m.host_us for m, _ in timed), default=0.0)
        found = in_turn(self.timer, [run for _, run in timed], self.effort, host_us)
        for (measurement, _), samples in zip(timed, found, strict=True):
            measurement.in_turn = Timing.of(samples)


@dataclass
class Budget:
    """Time and memory for many cases: `left_out` says why some are not measured."""

    seconds: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _cost: float = 0.0

    def why_spent(self) -> str:
        """Why nothing more starts that would not end in time, taking twice as long as the last; empty if it may."""
        if self.seconds is None or time.monotonic() - self._started + 2 * self._cost <= self.seconds:
            return ""
        return f"not run: the time budget of {self.seconds:g} s was spent"

    def spend(self, cases: Sequence[Case], device: torch.device) -> Iterator[Case]:
        """One after another, as long as there is time, without those that do not fit into memory."""
        for case in cases:
            if why := self.why_spent() or why_no_room(case, device):
                self.left_out[case.name] = why
                continue
            began = time.monotonic()
            yield case
            self._cost = time.monotonic() - began
