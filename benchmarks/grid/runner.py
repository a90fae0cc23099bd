"""Points x peers -> records, at little cost per point."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.cases import Case, Data, Setting, Shape, make_data
from benchmarks.grid.points import SOMEWHERE, needed_bytes, some
from benchmarks.grid.sampling import SampledReference
from benchmarks.peers import Peer, native_plan
from benchmarks.records import BASELINES, EAGER, OURS, PLAIN, CaseResult, Group, Measurement, Timing
from benchmarks.runner import MAIN, Runner, describe_error, empty_result
from epigemm.timing import Effort

EFFORT = Effort(rounds=9, min_ms=4.0, max_rounds=61, pause_s=None)
_FLOOR_EFFORT = Effort(rounds=101, min_ms=0.0, max_rounds=101, pause_s=None)
_MEMORY_SHARE = 0.8


class Inputs:
    """The operands and the result of every point, as views of memory that is drawn once per dtype.

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
        elements = max(shape.m * (shape.k or 0) for shape in shapes)
        generator = torch.Generator(self._device).manual_seed(self._seed + 1)
        self._x = torch.empty(elements, dtype=setting.dtype, device=self._device)
        self._x.normal_(generator=generator)
        self._out = torch.empty(max(s.m * s.n for s in shapes), dtype=setting.dtype, device=self._device)


@dataclass
class GridRunner(Runner):
    """Measures a grid of points on one device.

    Attributes:
        left_out: case -> why it was not measured at all.
    """

    left_out: dict[str, str] = field(default_factory=dict)
    _inputs: Inputs | None = None
    _cost_s: dict[str, float] = field(default_factory=dict)

    def floor(self) -> dict[str, Timing]:
        """What the timer shows for calls that do nothing: no time below it means anything."""
        found = {}
        for name, run in self._timer.nothing().items():
            host_us = self._timer.warm_up(run)
            found[name] = Timing.of(self._timer.in_turn([run], _FLOOR_EFFORT, host_us)[0])
        return found

    def grid_steps(self, cases: Sequence[Case]) -> int:
        """How many steps the progress display will see, at most."""
        return len(cases) + sum(len(self._some(cases)) for _ in self._somewhere())

    def sweep(self, cases: Sequence[Case]) -> Iterator[tuple[Case, CaseResult]]:
        """Measure; after each group yields the case and its record as it now stands.

        First every point with the peers that are quick to prepare, then the slow ones, one after another, at
        some points, together with ours, eager and the bare product again: only what was measured in turn may
        be divided.
        """
        fitting = self._with_room(cases)
        self._inputs = Inputs(self.device, fitting, self.seed) if fitting else None
        results: dict[str, CaseResult] = {}
        everywhere = [peer for peer in self.peers if peer.name not in SOMEWHERE]
        for case in fitting:
            if why := self._why_stop(MAIN):
                self.left_out[case.name] = why
                continue
            results[case.name] = empty_result(case)
            self._timed_group(case, results[case.name], MAIN, everywhere)
            yield case, results[case.name]
        again = [peer for peer in self.peers if peer.name in (OURS, EAGER, *BASELINES)]
        for peer in self._somewhere():
            for case in self._some(fitting):
                result = results.get(case.name)
                if result is None:
                    continue
                why = peer.applies(case, self.device) or self._why_stop(peer.name)
                if why:
                    result.skipped[peer.name] = why
                    continue
                self._timed_group(case, result, peer.name, [*again, peer])
                yield case, result

    def _with_room(self, cases: Sequence[Case]) -> list[Case]:
        """Those that fit into memory; the others are left out."""
        reasons = {case.name: why_no_room(case, self.device) for case in cases}
        self.left_out |= {name: why for name, why in reasons.items() if why}
        return [case for case in cases if not reasons[case.name]]

    def _somewhere(self) -> list[Peer]:
        return sorted((p for p in self.peers if p.name in SOMEWHERE), key=lambda p: SOMEWHERE.index(p.name))

    def _some(self, cases: Sequence[Case]) -> list[Case]:
        """The points for slow peers, of each problem and arithmetic."""
        found: list[Case] = []
        for key in dict.fromkeys((case.problem.name, case.setting) for case in cases):
            part = [case for case in cases if (case.problem.name, case.setting) == key]
            chosen = set(some([case.shape for case in part]))
            found += [case for case in part if case.shape in chosen]
        return found

    def _why_stop(self, name: str) -> str:
        """The next point has up to twice the rows of the last, and is not begun if that would not end in time."""
        if self.time_budget_s is None:
            return ""
        expected = 2 * self._cost_s.get(name, 0.0)
        if time.monotonic() - self._started + expected <= self.time_budget_s:
            return ""
        return f"left out: the time budget of {self.time_budget_s:g} s was spent"

    def _timed_group(self, case: Case, result: CaseResult, name: str, peers: Sequence[Peer]) -> None:
        started = time.monotonic()
        self._add_group(case, result, name, peers)
        self._cost_s[name] = time.monotonic() - started

    def _measure(self, case: Case, result: CaseResult, group: Group, peers: Sequence[Peer]) -> None:
        assert self._inputs is not None
        try:
            data, out = self._inputs.of(case)
            result.plan = native_plan(case, data, out)
            if case.on_pieces and any(peer.name == PLAIN for peer in peers):
                result.plan_plain = native_plan(case, data, out, packed=False)
            for plan in (result.plan, result.plan_plain):
                plan.pop("candidates", None)
            reference = SampledReference(case, data, self.seed)
        except Exception as error:
            group.measurements.append(Measurement(OURS, "epigemm", error=describe_error(error)))
            return
        prepared = [self._prepare(case, data, out, peer) for peer in self._applying(case, result, peers)]
        group.measurements += [p.measurement for p in prepared]
        for p in prepared:
            if p.alternative is not None and p.alternative.checked:
                self._check_one(reference, "signed", out, p)
        self._time([p for p in prepared if p.alternative is not None and not p.measurement.wrong])
        for p in prepared:
            if p.alternative is not None:
                p.alternative.close()

    def _release(self) -> None:
        """Nothing: the next point uses the same memory, and returning it costs more than a point."""


def why_no_room(case: Case, device: torch.device) -> str:
    """Why a point does not fit into memory; empty where it does."""
    needed, available = needed_bytes(case), _MEMORY_SHARE * _available_bytes(device)
    if needed <= available:
        return ""
    return f"left out: needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are to be had"


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
