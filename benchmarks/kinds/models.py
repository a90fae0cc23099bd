"""Whole models: eager against ``epigemm.fuse``, torch.compile against its backend "epigemm", and both in CUDA graphs.

Each ratio of each case is measured in a process of its own, alone on its GPU. Result and gradients are checked against
float64 before and after; what is wrong is not timed. The ratio is the median of the ratios of all turns, in which the
two take one row of calls each, between CUDA events. "host_ms" is what a call takes the host with nothing to wait for,
unless it waits within the call. "device_ms" is what it takes the device when all of it is queued before it begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.report import Table, number, progress
from benchmarks.harness.shards import Selection, Shard
from benchmarks.kinds import Run
from benchmarks.models import figures as found
from benchmarks.models import jobs as all_jobs
from benchmarks.models.jobs import RATIOS, VARIANTS, Job
from benchmarks.models.measures import QUICK, Effort
from benchmarks.models.pool import Pool, Worker
from benchmarks.models.worker import Prepare, prepare

METHOD = " ".join(str(__doc__).split("\n\n")[1].split())
TIME_BUDGET_S = 540.0
DEFAULT = ("eager_options", "backend")
"""The variants that are measured where none are named."""


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Cases by variant, and geometric means."""
    made = []
    for variant in VARIANTS.values():
        ratio, pair = variant.ratio, (variant.other, variant.own)
        columns = ["case", "ms", "ratio", "quartiles", "host ms", "device ms", "right"]
        columns[-1:-1] = ["chains"] * (variant.own == "eager_options")
        cases = {name: case for name, case in figures["cases"].items() if ratio in case["errors"]}
        rows = [_row(name, case, ratio, pair) for name, case in cases.items()]
        if rows:
            title = f"{ratio} (above 1: epigemm is faster; two times: {', '.join(pair)})"
            made.append(Table(title, tuple(columns), rows))
    means = [[name, *(number(of.get(ratio)) for ratio in RATIOS)] for name, of in figures["geomeans"].items()]
    return [*made, Table("Geometric means", ("cases", *RATIOS), means)]


def _row(name: str, case: Mapping[str, Any], ratio: str, pair: tuple[str, str]) -> list[str]:
    def both(times: Mapping[str, float]) -> str:
        return ", ".join(number(times.get(each)) for each in pair)

    q1, _, q3 = case.get("quartiles", {}).get(ratio, (None, None, None))
    row = [
        name,
        both(case.get("ms", {}).get(ratio, {})),
        number(case.get(ratio)),
        f"{number(q1)} {number(q3)}",
    ]
    row += [both(case.get(which, {})) for which in ("host_ms", "device_ms")]
    if ratio == VARIANTS["eager_options"].ratio:
        chains = case.get("chains")
        row.append(f"{chains['taken']} of {chains['followed']}" if chains else "")
    return [*row, "yes" if case["right"] else "NO"]


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """What there is to say of a record besides its tables."""
    return [f"missed: {text}" for text in figures["missed"]] + without_result(figures)


def without_result(figures: Mapping[str, Any]) -> list[str]:
    """What is wrong, and what there is no result of."""
    lines = [f"WRONG: {case}: {figures['cases'][case]['errors']}" for case in figures["wrong"]]
    for what in ("failed", "skipped", "not_reached"):
        reasons: dict[str, list[str]] = {}
        for name, why in figures[what].items():
            reasons.setdefault(why, []).append(name)
        word = what.upper() if what == "failed" else what.replace("_", " ")
        lines += [f"{word}: {why}: {', '.join(names)}" for why, names in reasons.items()]
    return lines


def _devices(run: Run) -> list[torch.device]:
    """The GPU that was named, else every one; or the CPU."""
    if run.device.type != "cuda" or run.options.device not in ("", "cuda"):
        return [run.device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class Suite:
    """Models to be measured, and what their record says.

    Attributes:
        kind: of the record.
        prepare: what the process of a job does first.
        add: takes up in the figures what became of a job.
        judged: of the figures and `quick`: what follows from all cases.
        said: the figure of a job's result, for people.
        tables: of the figures.
        remarks: of the figures: what there is to say besides.
        merge: one record of several.
    """

    kind: str
    method: str
    prepare: Prepare
    add: Callable[[dict[str, Any], Any, str, Any], None]
    judged: Callable[..., dict[str, Any]]
    said: Callable[[Mapping[str, Any], Any], str]
    tables: Callable[[Mapping[str, Any]], list[Table]]
    remarks: Callable[[Mapping[str, Any]], list[str]]
    merge: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    def measure(self, run: Run, every: Sequence[Any], figures: Mapping[str, Any], *, quick: bool) -> int:
        """This shard's part of the jobs, kept after each of them; 1 if a result is wrong or missing."""
        options = run.options
        shard = Shard.parse(options.shard)
        chosen = list(shard.part(every))
        if options.list:
            print("\n".join(map(str, chosen)))
            return 0
        effort = dataclasses.asdict(QUICK if quick else Effort()) | {"quick": quick}
        record = run.record(self.kind, self.method, effort)
        selection = Selection.of_names(map(str, every), shard, len(chosen)).to_json()
        record.figures = {"selection": selection, **figures, **found.empty()}
        record.figures |= self.judged(record.figures, quick=quick)
        told = progress(len(chosen))

        def tell(job: Any, what: str, value: Any) -> None:
            self.add(record.figures, job, what, value)
            record.figures |= self.judged(record.figures, quick=quick)
            record.write()
            told(f"{job}: {self.said(record.figures, job) if what == 'result' else f'{what} {value}'}")

        budget = TIME_BUDGET_S if options.time_budget is None else options.time_budget
        Pool(_devices(run), tell, budget, lambda *of: Worker(self.prepare, *of, quick=quick)).run(chosen)
        record.finish(self.tables(record.figures), self.remarks(record.figures))
        return bool(record.figures["wrong"] or record.figures["failed"])


def is_quick(run: Run) -> bool:
    """Few rounds, and no Inductor. A list is that of a GPU, wherever it is printed."""
    return bool(run.options.quick or (run.device.type == "cpu" and not run.options.list))


def _said(figures: Mapping[str, Any], job: Job) -> str:
    ratio = job.variant.ratio
    return f"{ratio} {number(figures['cases'][str(job.case)].get(ratio)) or 'WRONG'}"


SUITE = Suite("models", METHOD, prepare, found.add, found.judged, _said, tables, remarks, found.merge)


def main(run: Run) -> int:
    """Measure the jobs chosen; 1 if a result is wrong or missing."""
    options, quick = run.options, is_quick(run)
    every = all_jobs.jobs(options.cases, options.variants or DEFAULT, quick=quick)
    chosen = Shard.parse(options.shard).part(every)
    layers = found.layers({str(job.case): job for job in chosen})
    return SUITE.measure(run, every, {"layers": layers}, quick=quick)
