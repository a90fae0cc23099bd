"""Drawn points x cases -> times, checked before, and measured again where they are below the bar."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accuracy import Judge
from benchmarks.cases import Case, Data, Problem, Shape
from benchmarks.drawn.series import COMPILE, Series
from benchmarks.drawn.summary import DrawnPoint
from benchmarks.formulas import Parameters
from benchmarks.grid.runner import GridRunner, Inputs
from benchmarks.grid.tables import FALLBACK, road
from benchmarks.peers import Alternative, Peer, all_peers
from benchmarks.records import EAGER, OWN, PLAIN, CaseResult, Measurement
from benchmarks.runner import MAIN, _Prepared, empty_result
from epigemm.timing import Effort

PEERS = (EAGER, "mm", "addmm_activation", COMPILE)
EFFORT = Effort(rounds=5, min_ms=2.0, max_rounds=21, pause_s=None)
"""11 calls of what takes 200 us, 21 of anything short, 5 of anything long."""

_COMPILE_EVERY = 5
_TIMES_EAGER = 2.0
_AGAIN, _PAUSE_S = 2, 0.2


@dataclass
class DrawnRunner(GridRunner):
    """Measures cases at drawn points on one device.

    Attributes:
        peers: the baselines; ours are the cases' own.
    """

    _group: Sequence[Series] = ()
    _measured: tuple[Case, CaseResult] | None = None
    _turns: list[dict[str, float]] = field(default_factory=list)

    def measure(self, group: Sequence[Series], shapes: Sequence[Shape]) -> Iterator[DrawnPoint]:
        """Cases that share their baselines, at all points; one record for each case and point."""
        first = group[0]
        problem, setting = first.problem, first.setting
        cases = self._with_room([Case(problem, shape, setting) for shape in shapes])
        self._inputs = Inputs(self.device, cases, self.seed) if cases else None
        self._group = group
        own = [replace(p, applies=_always) for p in all_peers() if p.name in {s.own for s in group}]
        baselines = [_unchecked(peer) for peer in self.peers if peer.name not in (*OWN, COMPILE)]
        compiled = [compiled_peer(problem)] if any(peer.name == COMPILE for peer in self.peers) else []
        for index, case in enumerate(cases):
            if why := self._why_stop(MAIN):
                self.left_out[case.name] = why
                self.progress(f"{case.name}: left out", True)
                continue
            self._turns, result = [], empty_result(case)
            self._measured = (case, result)
            sometimes = compiled if index % _COMPILE_EVERY == 0 else []
            self._timed_group(case, result, MAIN, [*own, *baselines, *sometimes])
            for series in group:
                yield _point(series, case, result, self._turns)

    def _check_one(self, reference: Judge, kind: str, out: Tensor, p: _Prepared) -> None:
        """Hold a result against its bound; where PyTorch's GEMM made it, against eager's error, too.

        The bound is that of float32 sums. PyTorch lets cuBLAS add up parts of K in 16 bits, for eager as well: the
        fallback is right where its relative error is at most twice eager's.
        """
        super()._check_one(reference, kind, out, p)
        assert self._measured is not None and self._inputs is not None
        case, result = self._measured
        plan = result.plan_plain if p.peer.name == PLAIN else result.plan
        if p.alternative is None or not p.measurement.wrong or road(plan) != FALLBACK:
            return
        data, _ = self._inputs.of(case)
        eager = _forward(case.problem, data.x, data.weight, data.parameters)
        allowed = _TIMES_EAGER * reference.compare(eager, p.alternative.intermediate_roundings).relative_error
        found = p.measurement.accuracy[kind]
        is_right = math.isfinite(found.relative_error) and found.relative_error <= allowed
        p.measurement.accuracy[kind] = replace(found, ok=is_right)

    def _time(self, ready: Sequence[_Prepared]) -> None:
        """In turn; where a case is below its bar, in turn again, after a pause."""
        for p in ready:
            # The median of three calls leaves out one first call. These two may take longer at their second, too:
            # a choice that is remembered, a pack that is made, shapes that become dynamic.
            if p.peer.name in (*OWN, COMPILE) and p.alternative is not None:
                p.measurement.host_us = self._timer.warm_up(p.alternative.run)
        self._take_turns(ready)
        if not any(series.misses(self._turns[0]) for series in self._group):
            return
        for _ in range(_AGAIN):
            time.sleep(_PAUSE_S)
            for p in ready:  # wakes the device
                if p.alternative is not None:
                    p.alternative.run()
            self._take_turns(ready)

    def _take_turns(self, ready: Sequence[_Prepared]) -> None:
        super()._time(ready)
        times = {p.peer.name: p.measurement.in_turn for p in ready}
        self._turns.append({name: 1e3 * t.median_ms for name, t in times.items() if t is not None})


def compiled_peer(problem: Problem, backend: Any = "inductor") -> Peer:
    """One compiled function for all shapes, as users get it: its sizes become dynamic at the second shape.

    The tensors are its arguments, and what was compiled for another case is forgotten.
    """
    torch.compiler.reset()

    def forward(x: Tensor, weight: Tensor, parameters: Parameters) -> Tensor:
        return _forward(problem, x, weight, parameters)

    compiled: Any = torch.compile(forward, backend=backend)

    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        def run() -> Tensor:
            result: Tensor = compiled(data.x, data.weight, data.parameters)
            return result

        return Alternative(COMPILE, "torch.compile", run, checked=False)

    return Peer(COMPILE, "torch.compile", prepare)


def _forward(problem: Problem, x: Tensor, weight: Tensor | None, parameters: Parameters) -> Tensor:
    """Eager's."""
    assert weight is not None
    return problem.finish(F.linear(x, weight, parameters.linear_bias), parameters)


def _always(case: Case, device: torch.device) -> str:
    return ""


def _unchecked(peer: Peer) -> Peer:
    """The same, its results not held against float64: that costs as much as timing them."""

    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        return replace(peer.prepare(case, data, out), checked=False)

    return replace(peer, prepare=prepare)


def _point(series: Series, case: Case, result: CaseResult, turns: Sequence[dict[str, float]]) -> DrawnPoint:
    """What belongs to one case: without the times of another's call of ours."""
    found = {m.alternative: m for m in result.groups[-1].measurements}
    ours = found.get(series.own) or next(iter(found.values()))
    others = [name for name in OWN if name != series.own]
    return DrawnPoint(
        series,
        case.shape,
        [{name: us for name, us in turn.items() if name not in others} for turn in turns],
        road(result.plan_plain if series.own == PLAIN else result.plan),
        _why_wrong(ours),
        {m.alternative: m.error for m in found.values() if m.error and m.alternative not in OWN},
    )


def _why_wrong(measurement: Measurement) -> str:
    if measurement.error or not measurement.wrong:
        return measurement.error
    worst = max(measurement.accuracy.values(), key=lambda accuracy: accuracy.fraction_of_bound)
    return worst.problem or f"{worst.wrong_elements} elements, {worst.fraction_of_bound:.3g} of the bound"
