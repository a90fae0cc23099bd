"""The records, a module each: which cases, which ratios, what is wanted of them. All start from a `Run`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.baselines import Baseline
from benchmarks.cases import PRECISIONS, Case, Setting, Shape
from benchmarks.cases import random as drawn
from benchmarks.harness import environment
from benchmarks.harness.records import CaseResult
from benchmarks.harness.report import Record, progress, show
from benchmarks.harness.runner import Bench, Budget, fitting
from benchmarks.harness.timing import Effort

CPU_TIME_BUDGET_S = 40.0
"""A run on a CPU starts nothing slow after so many seconds, unless it is told otherwise."""
_ON_CPU = Effort(rounds=10, max_rounds=40)


@dataclass
class Run:
    """What every kind of record starts from: the options, and where it runs."""

    options: argparse.Namespace
    device: torch.device
    about: Mapping[str, Any]

    @property
    def budget(self) -> float | None:
        """Seconds after which nothing slow starts; None: no limit."""
        given: float | None = self.options.time_budget
        return CPU_TIME_BUDGET_S if given is None and self.device.type == "cpu" else given

    @property
    def multiprocessors(self) -> int:
        """Of the GPU; 0 without one."""
        return int(self.about["gpu"]["multiprocessors"]) if self.about["gpu"] else 0

    def bench(self, effort: Effort | None = None) -> Bench:
        """Timer and steps; by default as much effort as the device takes."""
        effort = effort or (Effort() if self.device.type == "cuda" else _ON_CPU)
        if self.options.quick:
            effort = dataclasses.replace(effort, rounds=5, min_ms=5.0, max_rounds=20)
        return Bench(self.device, effort)

    def baselines(
        self, among: Sequence[Baseline], excluded: Sequence[str] = ()
    ) -> tuple[list[Baseline], dict[str, str]]:
        """Those that take part, and why others do not; `excluded`: only where they are named."""
        return baselines.select(among, self.options.peers, excluded)

    def settings(self) -> list[Setting]:
        """Every arithmetic asked for."""
        precisions = PRECISIONS[: 2 if self.device.type == "cuda" else 1]
        return [
            Setting(dtype, precision)
            for dtype in dict.fromkeys(self.options.dtypes)
            for precision in (precisions if dtype == "fp32" else precisions[:1])
        ]

    def shapes(self) -> list[Shape]:
        """Of ``--sizes``, or random ones."""
        options = self.options
        if options.random is None:
            return [Shape.parse(text) for text in options.sizes]
        between = drawn.between(options.random) if options.between else []
        return drawn.draw(options.random, options.count) + between

    def record(self, kind: str, method: str, effort: Mapping[str, Any], folder: Path | None = None) -> Record:
        """An empty record; the machine is shown."""
        show([], [environment.headline(self.about)])
        return Record(kind, self.about, method, folder or self.options.output, effort)

    def measure(
        self,
        record: Record,
        bench: Bench,
        cases: Sequence[Case],
        available: Sequence[Baseline],
        figures: Callable[[Sequence[CaseResult]], dict[str, Any]],
    ) -> bool:
        """Fill a record, kept after each case; whether a result of ours is wrong.

        When time is up, cases go without the baselines that are slow here.
        """
        budget, told = Budget(self.budget), progress(len(cases))
        for asked in cases:
            case = fitting(asked, self.device)
            result = CaseResult.of(case)
            why = budget.why_spent()
            chosen = [b for b in available if not why or self.device.type not in b.slow_on]
            reasons = {b.name: b.applies(case, self.device) or why * (b not in chosen) for b in available}
            result.skipped = {name: why for name, why in reasons.items() if why}
            bench.measure(case, [b for b in chosen if not reasons[b.name]], result)
            record.results.append(result)
            wrong = {r.case: r.failure() for r in record.results if r.failure()}
            record.figures |= {**figures(record.results), "wrong": wrong}
            record.write()
            told(case.name)
        return bool(record.figures["wrong"])
