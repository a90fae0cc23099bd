"""Whole models: eager against ``epigemm.fuse``, torch.compile against its backend "epigemm".

Compiling takes longer than measuring. So every model compiles in a process of its own, all of them at once; then they
measure one after another, alone on the GPU: medians of turns, between CUDA events. What is not ready in time stops
after its present case and measures what it has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import matching
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Record, Table, progress
from benchmarks.kinds import Run
from benchmarks.models import worker
from benchmarks.models.registry import NETWORKS
from benchmarks.models.worker import INFERENCE, TRAINING, Case

METHOD = " ".join(str(__doc__).split("\n\n")[1].split())
TIME_BUDGET_S = 200.0
# Parts of the time budget: when compiling has to stop, and how long those that go on with a case are waited for.
_STOP, _WAIT = 0.5, 0.7
# They compile longest, and so they start first.
_SLOW_COMPILERS = ("mixer-b16", "dlrm", "vit-b16")
_RATIOS = {"fuse_vs_eager": 0.99, "backend_vs_compile": 0.98}


class Worker:
    """A process that compiles and measures one model in one mode."""

    def __init__(self, key: str, device: torch.device, *, quick: bool) -> None:
        self.key, self.is_ready, self.has_ended = key, False, False
        self.failed: dict[str, str] = {}
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        # As many processes as models: none of them needs threads of its own to keep all cores busy.
        single = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, single):
            self._process = context.Process(target=worker.work, args=(theirs, key, device, quick))
            self._process.start()
        theirs.close()

    def tell(self, word: str) -> None:
        """One word; it may have ended."""
        with contextlib.suppress(BrokenPipeError):
            self._line.send(word)

    def messages(self, until: float) -> Iterator[dict[str, Any]]:
        """What it says until then, without its failures, which are kept."""
        while not self.has_ended and self._line.poll(max(0.0, until - time.monotonic())):
            try:
                said = self._line.recv()
            except (EOFError, ConnectionResetError):
                self.has_ended = True
                return
            if "failed" in said:
                self.failed[said["failed"]] = said["why"]
            else:
                yield said

    def wait(self, until: float) -> None:
        """Until it is ready."""
        if not self.is_ready:
            self.is_ready = any("ready" in said for said in self.messages(until))

    def measure(self, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Its cases with their results."""
        self.tell("go")
        for said in self.messages(until):
            if "done" in said:
                return
            yield said["case"], said["result"]

    def end(self) -> None:
        """At once."""
        self._process.kill()
        self._process.join()


def ready_in_turn(workers: Sequence[Worker], begin: float, budget_s: float) -> Iterator[Worker]:
    """Those that are ready, in order, after all had their time to compile; then those that are late, as they come."""
    for each in workers:
        each.wait(begin + _STOP * budget_s)
    late = [each for each in workers if not each.is_ready]
    for each in late:
        each.tell("stop")
    for each in late:
        each.wait(begin + _WAIT * budget_s)
    # Those that still compile do so beside the others' measurements.
    for each in sorted(workers, key=lambda each: not each.is_ready):
        each.wait(begin + budget_s)
        yield each


def measure(
    record: Record, keys: Sequence[str], device: torch.device, budget_s: float, *, quick: bool
) -> None:
    """Start all, let one after another measure; the record is kept after each case."""
    found, failed, not_reached = (record.figures[name] for name in ("cases", "failed", "not_reached"))
    told = progress(sum(len(list(worker.cases(key, quick=quick))) for key in keys))
    begin = time.monotonic()
    started = sorted(keys, key=lambda key: not key.startswith(_SLOW_COMPILERS))
    by_key = {key: Worker(key, device, quick=quick) for key in started}
    try:
        for each in ready_in_turn([by_key[key] for key in keys], begin, budget_s):
            for case, result in each.measure(begin + budget_s) if each.is_ready else ():
                found[case] = result
                record.figures |= judged(keys, found, quick=quick)
                record.write()
                told(f"{case}: " + ", ".join(f"{name} {result[name]:.3f}" for name in _RATIOS))
            failed |= each.failed | ({each.key: "the process ended"} if each.has_ended else {})
            late = each.is_ready and time.monotonic() >= begin + budget_s
            for case in map(str, worker.cases(each.key, quick=quick)):
                if case not in found and case not in failed:
                    not_reached[case] = "no time left" if late else "not compiled in time"
    finally:
        for each in by_key.values():
            each.end()


def judged(keys: Sequence[str], found: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
    """Geometric means by precision, mode and size of the batch; what is below its bar; what is wrong.

    A quick run has no bars: its batches are too small.
    """
    groups: dict[str, list[Any]] = {}
    missed = []
    for case in (case for key in keys for case in worker.cases(key, quick=quick) if str(case) in found):
        result = found[str(case)]
        groups.setdefault(f"{case.precision}/{case.mode}/{'large' if case.is_large else 'small'}", []).append(
            result
        )
        missed += [
            f"{case}: {ratio} {result[ratio]:.3f}, wanted {bar(case, ratio)}"
            for ratio in _RATIOS
            if not quick and result[ratio] < bar(case, ratio)
        ]
    means = {
        name: {ratio: geomean([result[ratio] for result in group]) for ratio in _RATIOS}
        for name, group in groups.items()
    }
    wrong = [case for case, result in found.items() if not result["right"]]
    return {"geomeans": means, "missed": missed, "wrong": wrong}


def bar(case: Case, ratio: str) -> float:
    """What is wanted of a ratio: nowhere slower; of transformers at their large batch, more in inference."""
    if NETWORKS[case.network].is_transformer and case.is_large and case.mode == INFERENCE:
        if case.precision == "fp32_highest":
            return 2.0
        if case.precision == "bf16" and ratio == "fuse_vs_eager":
            return 1.03
    return _RATIOS[ratio]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Cases, and geometric means."""
    columns = ("case", "eager ms", "fuse ms", "ratio", "compile ms", "backend ms", "ratio", "right")
    rows = []
    for case, result in figures["cases"].items():
        ms = {name: f"{value:.3f}" for name, value in result["ms"].items()}
        fuse, backend = (f"{result[ratio]:.3f}" for ratio in _RATIOS)
        right = "yes" if result["right"] else "NO"
        rows.append([case, ms["eager"], ms["fuse"], fuse, ms["compile"], ms["backend"], backend, right])
    means = [[name, *(f"{mean:.3f}" for mean in of.values())] for name, of in figures["geomeans"].items()]
    return [Table("Whole models", columns, rows), Table("Geometric means", ("cases", *_RATIOS), means)]


def main(run: Run) -> int:
    """Measure the models chosen, kept after each case; 1 if a result is wrong or missing."""
    options, device = run.options, run.device
    names = [f"{name}/{mode}" for mode in (INFERENCE, TRAINING) for name in NETWORKS]
    keys = matching(names, options.cases, "the models are")
    quick = options.quick or device.type == "cpu"
    effort = {"turns": worker.TURNS, "least_ms": worker.LEAST_MS, "quick": quick}
    record = run.record("models", METHOD, effort)
    layers = {key.split("/")[0]: NETWORKS[key.split("/")[0]].layers for key in keys}
    record.figures = {"layers": layers} | judged(keys, {}, quick=quick)
    record.figures |= {"failed": {}, "not_reached": {}, "cases": {}}
    budget = TIME_BUDGET_S if options.time_budget is None else options.time_budget
    measure(record, keys, device, budget, quick=quick)
    figures = record.figures
    remarks = [f"missed: {text}" for text in figures["missed"]]
    remarks += [f"WRONG: {case}: {figures['cases'][case]['errors']}" for case in figures["wrong"]]
    remarks += [f"FAILED: {name}: {why}" for name, why in figures["failed"].items()]
    remarks += [f"not reached: {name}: {why}" for name, why in figures["not_reached"].items()]
    record.finish(tables(figures), remarks)
    return bool(figures["wrong"] or figures["failed"])
