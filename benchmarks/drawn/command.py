"""What ``--random`` does: draw, measure, keep records, show what is below its bar."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, peers, report
from benchmarks.cases import Shape
from benchmarks.drawn import points
from benchmarks.drawn.runner import PEERS, DrawnRunner
from benchmarks.drawn.series import COMPILE, SMALL_US, Series, groups, select, why_skipped
from benchmarks.drawn.summary import DrawnPoint, point_table, summarise, summary_table, worst_points
from epigemm.timing import Effort, compile_in_this_process

RESULTS = Path("benchmarks") / "results"
COUNT = 200
_SHAPES = ("sizes", "sweep_m", "fp32", "quick", "host", "models")
_ELSEWHERE = (
    *_SHAPES,
    "grid",
    "unchecked",
    "dtypes",
    "precision",
    "no_peers",
    "json",
    "csv",
    "plots",
    "markdown",
)
METHOD = (
    "Shapes drawn at random from the seed, none of them chosen. Medians of calls in turn, the L2 cache flushed before "
    "each call, the host ahead. The ratio is the time of the best baseline over ours: of eager and "
    "torch._addmm_activation, without the latter of eager and torch.compile, which runs at every fifth point. A point "
    "below its bar is measured twice more; the median of the three ratios counts. Points at which we or the best "
    "baseline take less than 20 us are judged apart."
)


def check(options: argparse.Namespace) -> None:
    """Whether the options of ``--random`` go together.

    Raises:
        ValueError: they do not.
    """
    if options.random is None:
        if options.between or options.count is not None:
            raise ValueError("--count, --between: go with --random SEED, which their points follow from")
        return
    if _count(options) < 0 or not (_count(options) or options.between):
        raise ValueError(f"--count: expected at least 1, or 0 with --between, got {options.count}")
    if given := [name for name in (_SHAPES if options.plans else _ELSEWHERE) if getattr(options, name)]:
        raise ValueError(f"--random: goes without --{given[0].replace('_', '-')}")


def shapes(options: argparse.Namespace) -> list[Shape]:
    """The random points, then those between powers of two if they are asked for."""
    more = points.between(options.random) if options.between else []
    return points.draw(options.random, _count(options)) + more


def _count(options: argparse.Namespace) -> int:
    return COUNT if options.count is None else int(options.count)


def folder(output: Path | None, about: Mapping[str, Any], seed: int) -> Path:
    """Where a seed's records go: below ``output``, else below benchmarks/results/GPU."""
    gpu = (about["gpu"] or {"name": "cpu"})["name"]
    return (output or RESULTS / re.sub("[^a-z0-9]+", "-", gpu.lower()).strip("-")) / f"random-{seed}"


@dataclass
class DrawnRun:
    """A run of ``--random``.

    Attributes:
        runner: what measures.
        cases: which, without those that make no sense here.
        about: the environment.
        seed, count: of the random points.
        between: with the points between powers of two.
        skipped: case -> why it is not measured here.
    """

    runner: DrawnRunner
    cases: Sequence[Series]
    about: dict[str, Any]
    seed: int
    count: int
    between: bool
    skipped: dict[str, str] = field(default_factory=dict)
    found: list[DrawnPoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Leave out what makes no sense on this device."""
        reasons = {series.name: why_skipped(series, self.runner.device) for series in self.cases}
        self.skipped = {name: why for name, why in reasons.items() if why}
        self.cases = [series for series in self.cases if not reasons[series.name]]

    def shapes(self, series: Series) -> list[Shape]:
        """The points of a case."""
        return points.between(self.seed) if series.between else points.draw(self.seed, self.count)

    def measure(self, progress: Callable[[int], AbstractContextManager[Any]], target: Path) -> list[Path]:
        """Measure everything; the files, which are written after each group of cases."""
        if any(peer.name == COMPILE for peer in self.runner.peers):
            compile_in_this_process()
        together = groups(self.cases)
        with progress(sum(len(self.shapes(group[0])) for group in together)) as self.runner.progress:
            for group in together:
                self.found += self.runner.measure(group, self.shapes(group[0]))
                self.keep(target, complete=False)
        return self.keep(target, complete=True)

    def summary(self, *, complete: bool) -> dict[str, Any]:
        """What summary.json holds."""
        names = [s.name for s in self.cases]
        by_case = {name: [p for p in self.found if p.series.name == name] for name in names}
        return {
            "schema": report.SCHEMA,
            "kind": "random",
            "complete": complete,
            **environment.identity(self.about),
            "seed": self.seed,
            "points": self.count,
            "between": self.between,
            "effort": dataclasses.asdict(self.runner.effort),
            "method": METHOD,
            "skipped": self.skipped,
            "left_out": self.runner.left_out,
            "cases": {name: report.finite(summarise(found)) for name, found in by_case.items() if found},
        }

    def keep(self, target: Path, *, complete: bool) -> list[Path]:
        """Write ``summary.json``, ``points.json`` and ``points.md``."""
        summary = self.summary(complete=complete)
        record = {"summary": summary, "environment": self.about}
        record |= {"points": report.finite([point.record() for point in self.found])}
        report.write_json(summary, target / "summary.json")
        report.write_json(record, target / "points.json")
        text = [f"# {environment.headline(self.about)}", "", f"`{summary['command']}`", "", METHOD, ""]
        text += [summary_table(summary["cases"]).markdown()]
        text += [point_table("The worst points of each case", worst_points(self.found)).markdown()]
        text += [f"- {remark}" for remark in self.remarks()]
        (target / "points.md").write_text("\n".join(text) + "\n")
        return [target / name for name in ("summary.json", "points.json", "points.md")]

    def remarks(self) -> list[str]:
        """What is wrong, and what was not measured."""
        found = [f"WRONG: {p.series.name} {p.size}: {p.wrong}" for p in self.found if p.wrong]
        errors = [(p.series.name, name, why) for p in self.found for name, why in p.errors.items()]
        found += [
            f"{case}: {name}: {errors.count((case, name, why))} points: {why}"
            for case, name, why in dict.fromkeys(errors)
        ]
        reasons = list(self.runner.left_out.values())
        found += [f"{reasons.count(why)} points: {why}" for why in dict.fromkeys(reasons)]
        return found + [f"{name}: {why}" for name, why in self.skipped.items()]

    @property
    def failed(self) -> bool:
        """Whether a result of ours is wrong or missing."""
        return any(point.wrong for point in self.found)

    def announce(self, console: report.Console) -> None:
        """The cases, nothing measured."""
        rows = [
            [s.name, str(len(self.shapes(s))), f"{s.bar:g}", f"{s.small_bar or s.bar:g}"] for s in self.cases
        ]
        console.table("cases", ["case", "points", "bar", f"under {SMALL_US:g} us"], rows)
        for remark in self.remarks():
            console.line(report.plain(remark))

    def show(self, console: report.Console) -> None:
        """The summary, the points below the bar, and what is wrong."""
        below = [point for point in self.found if point.below]
        tables = [summary_table(self.summary(complete=True)["cases"])]
        tables += [point_table("Below the bar", below)] if below else []
        for table in tables:
            console.table(table.title, table.columns, ([report.plain(c) for c in row] for row in table.rows))
        for remark in self.remarks():
            console.line(report.plain(remark))


def plan(
    options: argparse.Namespace, device: torch.device, effort: Effort, time_budget_s: float | None
) -> DrawnRun:
    """Resolve the options.

    Raises:
        ValueError: an unknown case, peer or tree.
    """
    # On a CPU, Inductor calls a C++ compiler for every case.
    default = [name for name in PEERS if device.type == "cuda" or name != COMPILE]
    wanted = peers.select_peers(options.peers or default, options.exclude, only_ours=False)
    available, _ = peers.present(wanted)
    return DrawnRun(
        DrawnRunner(device, available, effort, time_budget_s, options.seed),
        select(options.cases, count=_count(options), between=options.between),
        environment.describe(device, options.trees),
        options.random,
        _count(options),
        options.between,
    )
