"""Any epilogue from one Python function, against what PyTorch users have: ``python -m benchmarks --custom``.

Every result of ours is held against float64 before anything is timed, and again, with the rivals', before its case is.
One that is wrong ends the run, and no figure is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import custom_tables, environment, first_call, report
from benchmarks.cases import Case, Data, Shape
from benchmarks.custom_cases import LAYERS, select, why_no_epilogue
from benchmarks.custom_peers import custom_peers
from benchmarks.custom_tables import Measured
from benchmarks.peers import COMPILE, Peer, present, select_peers
from benchmarks.records import BUILTIN, MAX_AUTOTUNE, OURS, CaseResult, Measurement
from benchmarks.runner import Runner, _Prepared, empty_result
from epigemm.timing import Effort

KIND = "custom"
METHOD = (
    "Times of others over ours; above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. fp32 is at torch's default precision, our weight packed. The best is the best of eager, "
    "torch.compile, its max-autotune and QuACK, as far as they ran; they get the bias inside F.linear. The bare "
    "product is torch.mm alone, the built-in our own function of the same epilogue. Milliseconds are of the first "
    "group in which an alternative ran: ratios are taken within a group. The first call, of GELU with a bias at "
    "16384x4096x4096 if no size is given, is timed in a fresh process each: torch imported, CUDA initialised, the "
    "function decorated, the weight packed; once with an empty cache, once with what that has left on disk."
)
_CHECKED = (OURS, BUILTIN)
_ELSEWHERE = (
    *("sweep_m", "fp32", "grid", "random", "precision", "plans", "host", "models"),
    *("json", "csv", "plots", "markdown"),
)
Progress = Callable[[int], AbstractContextManager[Any]]


@dataclass
class CustomRunner(Runner):
    """Measures the cases, which have no plan of a built-in's."""

    _checks_only: bool = False

    def check(self, cases: Sequence[Case]) -> dict[str, str]:
        """Hold ours, the built-ins among them, against float64; what is wrong, by case."""
        self._checks_only = True
        peers = [peer for peer in self.peers if peer.name in _CHECKED]
        wrong: dict[str, str] = {}
        for case in cases:
            result = empty_result(case)
            self._add_group(case, result, "check", peers)
            if why := why_wrong(result):
                wrong[case.name] = why
        self._checks_only = False
        return wrong

    def _explain(self, case: Case, data: Data, out: Tensor, result: CaseResult) -> None:
        """Nothing: dispatch explains built-ins by their names."""

    def _measure_memory(
        self, case: Case, data: Data, out: Tensor, result: CaseResult, ready: Sequence[_Prepared]
    ) -> None:
        """Nothing: it is the same as the built-ins'."""

    def _time(self, ready: Sequence[_Prepared]) -> None:
        if not self._checks_only:
            super()._time(ready)


def _why_wrong(m: Measurement) -> str:
    if m.error or not m.wrong:
        return m.error
    worst = max(m.accuracy.values(), key=lambda accuracy: accuracy.fraction_of_bound)
    return worst.problem or f"{worst.wrong_elements} elements, {worst.fraction_of_bound:.3g} of the bound"


def why_wrong(result: CaseResult) -> str:
    """Why a result of ours is wrong or missing; empty where none is."""
    found = ((m.title, _why_wrong(m)) for _, m in result.rows if m.alternative in _CHECKED)
    return "; ".join(f"{title}: {why}" for title, why in found if why)


@dataclass
class CustomRun:
    """One run: what is measured, by whom, and what has come out."""

    runner: CustomRunner
    cases: Sequence[Case]
    shape: Shape | None
    about: Mapping[str, Any]
    absent: Mapping[str, str]
    first_call_s: dict[str, float] = dataclasses.field(default_factory=dict)
    cached_call_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    measured: list[Measured] = dataclasses.field(default_factory=list)

    def summary(self, *, complete: bool) -> dict[str, Any]:
        """What summary.json holds."""
        return {
            "schema": report.SCHEMA,
            "kind": KIND,
            "complete": complete,
            **environment.identity(self.about),
            "cpu": self.about["cpu"]["name"],
            "packages": self.about["packages"],
            "effort": dataclasses.asdict(self.runner.effort),
            "method": METHOD,
            "first_call_s": self.first_call_s,
            "cached_call_ms": self.cached_call_ms,
            "cases": custom_tables.figures(self.measured),
            "best": custom_tables.best(self.measured),
            "ms": custom_tables.times(self.measured),
            "absent": dict(self.absent),
            "not_run": custom_tables.not_run(self.measured),
        }

    def measure(self, progress: Progress, keep: Path | None) -> dict[str, str]:
        """Check all, then measure all, kept after each step; what is wrong, by case, if anything is."""
        dtypes = list(dict.fromkeys(case.setting.dtype_name for case in self.cases))
        with progress(len(self.cases) + self.runner.steps(self.cases)) as self.runner.progress:
            if wrong := self.runner.check(self.cases):
                return wrong
            self.runner.progress("the first call of a process", False)
            try:
                first, cached = first_call.measure(dtypes, self.shape, self.runner.device)
            except first_call.FirstCallError as error:
                return {"first call": str(error)}
            self.first_call_s.update(first)
            self.cached_call_ms.update(cached)
            by_name = {case.name: case for case in self.cases}
            for result, _ in self.runner.run(self.cases):
                if why := why_wrong(result):
                    if keep:
                        keep.unlink(missing_ok=True)
                    return {result.case: why}
                if not any(result is known for _, known in self.measured):
                    self.measured.append((by_name[result.case], result))
                if keep:
                    report.write_json(self.summary(complete=False), keep)
        return {}


def plan(
    options: argparse.Namespace, device: torch.device, effort: Effort, budget: float | None
) -> CustomRun:
    """Resolve the options.

    Raises:
        ValueError: options that do not go with ``--custom``, an unknown name, or no `epigemm.epilogue`.
    """
    if given := [name for name in _ELSEWHERE if getattr(options, name)]:
        raise ValueError(f"--custom: goes without --{given[0].replace('_', '-')}")
    if why := why_no_epilogue():
        raise ValueError(f"--custom: {why}")
    sizes = list(LAYERS.values()) if options.layers else [Shape.parse(text) for text in options.sizes]
    cases = select(options.cases, sizes, options.dtypes or (), device)
    # On a CPU a compiler takes longer than all the rest.
    slow = [COMPILE] if options.quick and device.type == "cpu" else []
    excluded = [*options.exclude, *slow, *([MAX_AUTOTUNE] if options.no_max_autotune else [])]
    chosen = select_peers(options.peers, excluded, only_ours=options.no_peers, among=custom_peers())
    available, absent = present(chosen)
    left_out = {peer.name: "left out on the command line" for peer in _others(chosen)}
    runner = CustomRunner(
        device,
        available,
        dataclasses.replace(effort, pause_s=None),
        budget,
        limits_all=True,
        seed=options.seed,
    )
    about = environment.describe(device, options.trees)
    return CustomRun(runner, cases, sizes[0] if sizes else None, about, absent | left_out)


def _others(chosen: Sequence[Peer]) -> list[Peer]:
    return [peer for peer in custom_peers() if peer.name not in {p.name for p in chosen}]


def run(
    console: report.Console, planned: CustomRun, progress: Progress, folder: Path | None
) -> Mapping[str, str]:
    """Measure, show, and write summary.json and custom.md; what is wrong, if anything is, and then no figure."""
    headline = environment.headline(dict(planned.about))
    console.line(report.plain(headline))
    keep = folder / "summary.json" if folder else None
    if wrong := planned.measure(progress, keep):
        for case, why in wrong.items():
            console.line(f"[bold red]FAILED[/]: {report.plain(f'{case}: {why}')}")
        return wrong
    summary = planned.summary(complete=True)
    for table in (custom_tables.case_table(summary), custom_tables.call_table(summary)):
        console.table(table.title, table.columns, table.rows)
    misses = [f"missed: {line}" for line in custom_tables.missed(summary)] if summary["gpu"] else []
    for line in [*misses, *custom_tables.remarks(summary)]:
        console.line(report.plain(line))
    if keep:
        text = keep.with_name("custom.md")
        report.write_json(summary, keep)
        text.write_text(custom_tables.markdown(summary, headline, METHOD))
        for path in (keep, text):
            console.line(f"wrote {path}")
    return {}
