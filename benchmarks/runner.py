"""Cases x peers -> records.

Two passes. The first measures every case against all peers that are quick to prepare. The second adds the
slow ones (autotuners, and ``torch.compile`` on a CPU) case by case, together with ours, eager and the bare
product again, because times may be divided only when they were measured in turn. So a run that ends early has
lost the least.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.accuracy import Judge, Reference
from benchmarks.cases import Case, Data, Setting, fitting, make_data
from benchmarks.memory import measure_memory
from benchmarks.peers import Alternative, Peer, native_plan, poisoned
from benchmarks.records import (
    BASELINES,
    EAGER,
    OURS,
    OWN,
    PLAIN,
    CaseResult,
    Ceiling,
    Group,
    Measurement,
    Timing,
)
from epigemm.timing import Effort, Timer, make_timer

MAIN, SLOW = "main", "slow"
_UNIFORM, _SIGNED = "uniform", "signed"
_FP16_PRODUCTS = {"split": 3, "scaled": 1}


@contextmanager
def matmul_precision(setting: Setting) -> Iterator[None]:
    """Torch's fp32 matmul precision as the case asks, put back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting.precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class _Prepared:
    """One alternative on its way through a group; ``alternative`` is None once it has failed."""

    peer: Peer
    measurement: Measurement
    alternative: Alternative | None


@dataclass
class Runner:
    """Runs cases on one device.

    Attributes:
        device: where.
        peers: those that this machine has, ours first.
        effort: how much to measure.
        time_budget_s: no slow peer starts after so many seconds; None means no limit.
        limits_all: no case starts after them either.
        seed: of all random numbers.
        progress: told what is being done, and whether a step has just been finished.
    """

    device: torch.device
    peers: Sequence[Peer]
    effort: Effort
    time_budget_s: float | None = None
    limits_all: bool = False
    seed: int = 0
    progress: Callable[[str, bool], None] = lambda text, finished: None
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Allocate the timer's flush buffer once."""
        self._timer: Timer = make_timer(self.device)

    def is_slow(self, peer: Peer) -> bool:
        """Whether a peer waits for the second pass."""
        return self.device.type in peer.slow_on

    def steps(self, cases: Sequence[Case]) -> int:
        """How many steps the progress display will see."""
        return len(cases) + sum(1 for case in cases if self._slow_peers(case))

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[CaseResult, Group]]:
        """Measure; after each group yields the case's record as it now stands, and the new group."""
        results: list[tuple[Case, CaseResult]] = []
        quick = [peer for peer in self.peers if not self.is_slow(peer)]
        for case in cases:
            case = fitting(case, self.device)
            result = empty_result(case)
            if self.limits_all and self._out_of_time():
                self._leave_out(case, result, self.peers)
                yield result, Group(MAIN)
                continue
            results.append((case, result))
            yield result, self._add_group(case, result, MAIN, quick)
        for case, result in results:
            slow = self._slow_peers(case)
            if not slow:
                continue
            if self._out_of_time():
                self._leave_out(case, result, slow)
                continue
            again = [peer for peer in self.peers if peer.name in (OURS, EAGER, *BASELINES)]
            yield result, self._add_group(case, result, SLOW, [*again, *slow])

    def _leave_out(self, case: Case, result: CaseResult, peers: Sequence[Peer]) -> None:
        for peer in peers:
            result.skipped[peer.name] = f"left out: the time budget of {self.time_budget_s:g} s was spent"
        self.progress(f"{case.name}: left out", True)

    def _slow_peers(self, case: Case) -> list[Peer]:
        return [p for p in self.peers if self.is_slow(p) and not p.applies(case, self.device)]

    def _out_of_time(self) -> bool:
        return self.time_budget_s is not None and time.monotonic() - self._started > self.time_budget_s

    def _add_group(self, case: Case, result: CaseResult, name: str, peers: Sequence[Peer]) -> Group:
        group = Group(name)
        with torch.no_grad(), matmul_precision(case.setting):
            self._measure(case, result, group, peers)
        result.groups.append(group)
        self._release()
        self.progress(case.name, True)
        return group

    def _release(self) -> None:
        """Return a case's memory before the next one allocates its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, case: Case, result: CaseResult, group: Group, peers: Sequence[Peer]) -> None:
        self.progress(f"{case.name}: preparing", False)
        try:
            data = make_data(case, self.device, self.seed)
            out = torch.empty(case.shape.m, case.shape.n, dtype=case.setting.dtype, device=self.device)
            self._explain(case, data, out, result)
        except Exception as error:
            group.measurements.append(Measurement(OURS, "epigemm", error=describe_error(error)))
            return
        prepared = [self._prepare(case, data, out, peer) for peer in self._applying(case, result, peers)]
        group.measurements += [p.measurement for p in prepared]
        self.progress(f"{case.name}: checking against float64", False)
        self._check(case, data, out, prepared)
        self.progress(f"{case.name}: timing", False)
        ready = [p for p in prepared if p.alternative is not None and not p.measurement.wrong]
        self._time(ready)
        for p in prepared:
            if p.alternative is not None:
                p.alternative.close()
        if case.on_pieces and self.device.type == "cuda" and group.name == MAIN:
            self._measure_memory(case, data, out, result, ready)

    def _explain(self, case: Case, data: Data, out: Tensor, result: CaseResult) -> None:
        """Record what our dispatcher says of the call."""
        result.plan = native_plan(case, data, out)
        if case.on_pieces:
            result.plan_plain = native_plan(case, data, out, packed=False)

    def _measure_memory(
        self, case: Case, data: Data, out: Tensor, result: CaseResult, ready: Sequence[_Prepared]
    ) -> None:
        """Our own and eager's, one after the other, once nothing else runs."""
        for p in ready:
            if p.peer.name not in (*OWN, EAGER):
                continue
            plan = result.plan_plain if p.peer.name == PLAIN else result.plan
            try:
                p.measurement.memory = measure_memory(case, data, out, p.peer, plan)
            except Exception as error:
                p.measurement.error = describe_error(error)

    def _applying(self, case: Case, result: CaseResult, peers: Sequence[Peer]) -> list[Peer]:
        reasons = {peer.name: peer.applies(case, self.device) for peer in peers}
        result.skipped |= {name: why for name, why in reasons.items() if why}
        return [peer for peer in peers if not reasons[peer.name]]

    def _prepare(self, case: Case, data: Data, out: Tensor, peer: Peer) -> _Prepared:
        measurement = Measurement(peer.name, peer.title)
        self.progress(f"{case.name}: preparing {peer.title}", False)
        try:
            alternative = peer.prepare(case, data, out)
            measurement.host_us = self._timer.warm_up(alternative.run)
        except Exception as error:  # one alternative that fails must not take the others with it
            measurement.error = describe_error(error)
            return _Prepared(peer, measurement, None)
        return _Prepared(peer, measurement, alternative)

    def _check(self, case: Case, data: Data, out: Tensor, prepared: Sequence[_Prepared]) -> None:
        """Our own on signed and on uniform inputs, the others on uniform ones; x ends as it began."""
        for kind, signed in ((_SIGNED, True), (_UNIFORM, False)):
            data.refill(signed, self.seed + 1)
            checked = [
                p
                for p in prepared
                if p.alternative is not None
                and p.alternative.checked
                and (p.measurement.alternative in OWN or not signed)
            ]
            if not checked:
                continue
            reference = Reference(case, data, self.seed)
            for p in checked:
                self._check_one(reference, kind, out, p)

    def _check_one(self, reference: Judge, kind: str, out: Tensor, p: _Prepared) -> None:
        assert p.alternative is not None
        try:
            result = poisoned(p.alternative, out).run()
            p.measurement.accuracy[kind] = reference.compare(result, p.alternative.intermediate_roundings)
        except Exception as error:
            p.measurement.error = describe_error(error)
            p.alternative.close()
            p.alternative = None

    def _time(self, ready: Sequence[_Prepared]) -> None:
        runs = [p.alternative.run for p in ready if p.alternative is not None]
        host_us = max((p.measurement.host_us for p in ready), default=0.0)
        for p, samples in zip(ready, self._timer.in_turn(runs, self.effort, host_us), strict=True):
            p.measurement.in_turn = Timing.of(samples)
        if self.effort.pause_s is None:
            return
        for p, run in zip(ready, runs, strict=True):
            assert p.measurement.in_turn is not None
            typical = p.measurement.in_turn.median_ms
            p.measurement.alone = Timing.of(
                self._timer.alone(run, self.effort, typical, p.measurement.host_us)
            )

    def ceilings(self, settings: Sequence[Setting]) -> list[Ceiling]:
        """Measured limits: a large product in each arithmetic, a large copy (bytes read plus written)."""
        self.progress("measuring ceilings", False)
        cuda = self.device.type == "cuda"
        side, copied = (8192, 1 << 30) if cuda else (1024, 1 << 26)
        effort = Effort(rounds=8, min_ms=0.0)
        found: list[Ceiling] = []
        on_pieces = cuda and any(setting.pieces for setting in settings)
        for setting in dict.fromkeys([*settings, *([Setting("fp16", "highest")] if on_pieces else [])]):
            with torch.no_grad(), matmul_precision(setting):
                a, b = (torch.rand(side, side, device=self.device).to(setting.dtype) for _ in range(2))
                timing = self._ceiling(partial(torch.mm, a, b), effort)
            found.append(Ceiling(str(setting), 2 * side**3 / timing.median_ms / 1e9, "TFLOP/s", timing))
        source = torch.rand(copied // 4, device=self.device)
        target = torch.empty_like(source)
        timing = self._ceiling(lambda: target.copy_(source), effort)
        found.append(Ceiling("copy", 2 * copied / timing.median_ms / 1e6, "GB/s", timing))
        return found

    def _ceiling(self, run: Callable[[], Tensor], effort: Effort) -> Timing:
        host_us = self._timer.warm_up(run)
        return Timing.of(self._timer.in_turn([run], effort, host_us)[0])


def describe_error(error: Exception) -> str:
    """An exception in one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:300] if first else ''}"


def empty_result(case: Case) -> CaseResult:
    """The record of a case before anything is measured."""
    shape = case.shape
    return CaseResult(
        case=case.name,
        problem=case.problem.name,
        models=case.models,
        formula=case.problem.formula.formula,
        shape=(shape.m, shape.n) if shape.k is None else (shape.m, shape.n, shape.k),
        dtype=case.setting.dtype_name,
        precision=case.setting.precision if case.setting.dtype_name == "fp32" else "",
        training=case.problem.training,
        flops=case.flops,
        bytes=case.bytes,
        fp16_products=_FP16_PRODUCTS[case.setting.pieces] if case.on_pieces else 0,
    )


def throughput(result: CaseResult, ms: float) -> tuple[float, str]:
    """TFLOP/s of a case with a product, GB/s of one without, at a time per call."""
    if ms <= 0:
        return math.nan, ""
    return (result.flops / ms / 1e9, "TFLOP/s") if result.flops else (result.bytes / ms / 1e6, "GB/s")
