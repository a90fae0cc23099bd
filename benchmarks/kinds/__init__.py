"""The records, a module each: which cases, which ratios, what is wanted of them. All start from a `Run`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.baselines import Baseline
from benchmarks.cases import PRECISIONS, Setting, Shape
from benchmarks.cases import random as drawn
from benchmarks.harness import environment
from benchmarks.harness.records import MAX_AUTOTUNE
from benchmarks.harness.report import Console
from benchmarks.harness.runner import Bench
from epigemm.timing import Effort

CPU_TIME_BUDGET_S, MODELS_TIME_BUDGET_S = 40.0, 200.0
"""A run on a CPU, or of models, starts nothing slow after so many seconds, unless it is told otherwise."""
SEED = 0
_ON_CPU = Effort(rounds=10, max_rounds=40, alone_calls=10, pause_s=0.1)


@dataclass
class Run:
    """What every kind of record starts from: the options, where it runs, where it shows its tables."""

    console: Console
    options: argparse.Namespace
    device: torch.device
    kind: str
    about: Mapping[str, Any]

    @property
    def budget(self) -> float | None:
        """Seconds after which nothing slow starts; None: no limit."""
        given: float | None = self.options.time_budget
        return CPU_TIME_BUDGET_S if given is None and self.device.type == "cpu" else given

    def bench(self, effort: Effort | None = None) -> Bench:
        """Timer and steps."""
        effort = effort or (Effort() if self.device.type == "cuda" else _ON_CPU)
        if self.options.quick:
            effort = dataclasses.replace(effort, rounds=5, min_ms=5.0, max_rounds=20, pause_s=None)
        if rounds := self.options.rounds:
            effort = dataclasses.replace(effort, rounds=rounds, max_rounds=max(rounds, effort.max_rounds))
        return Bench(self.device, effort, SEED)

    def baselines(
        self, among: Sequence[Baseline], exclude: Sequence[str] = ()
    ) -> tuple[list[Baseline], dict[str, str]]:
        """Those that take part, and why others do not."""
        options = self.options
        known = [baseline.name for baseline in among]
        if options.no_max_autotune and MAX_AUTOTUNE in known:
            exclude = [*exclude, MAX_AUTOTUNE]
        chosen = baselines.select(among, options.peers, [*options.exclude, *exclude])
        available, absent = baselines.present(chosen)
        names = {baseline.name for baseline in chosen}
        return available, absent | {n: "left out on the command line" for n in known if n not in names}

    def settings(self) -> list[Setting]:
        """Every arithmetic asked for."""
        precisions = self.options.precision or PRECISIONS[: 2 if self.device.type == "cuda" else 1]
        chosen = [
            Setting(dtype, precision)
            for dtype in self.options.dtypes or ["fp32", "bf16"]
            for precision in (precisions if dtype == "fp32" else ["highest"])
        ]
        return list(dict.fromkeys(chosen))

    def shapes(self) -> list[Shape]:
        """Of ``--sizes``, or random ones."""
        options = self.options
        if options.random is None:
            return [Shape.parse(text) for text in options.sizes]
        between = drawn.between(options.random) if options.between else []
        return drawn.draw(options.random, options.count) + between

    def announce(self) -> None:
        """The machine."""
        self.console.line(environment.headline(self.about))
