"""Whole models: eager against ``epigemm.fuse``, torch.compile against its backend "epigemm".

Compiling takes longer than measuring. So every model compiles in a process of its own, all of them at once; then they
measure one after another, alone on the GPU: medians of turns, between CUDA events. What is not ready in time stops
after its present case and measures what it has.
"""

from __future__ import annotations

import contextlib
import fnmatch
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.progress import shown_progress
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Record, Table
from benchmarks.kinds import MODELS_TIME_BUDGET_S, Run
from benchmarks.models import worker
from benchmarks.models.networks import NETWORKS
from benchmarks.models.worker import INFERENCE, TRAINING, Case

METHOD = " ".join(str(__doc__).split("\n\n")[1].split())
# Parts of the time budget: when compiling has to stop, and how long those that go on with a case are waited for.
_STOP, _WAIT = 0.5, 0.7
# They compile longest, and so they start first.
_SLOW_COMPILERS = ("mixer-b16", "dlrm", "vit-b16")
_RATIOS = {"fuse_vs_eager": 0.99, "backend_vs_compile": 0.98}
Key = tuple[str, str]


def select(patterns: Sequence[str]) -> list[Key]:
    """Networks with modes: those whose NETWORK/MODE holds or matches a pattern; all for none.

    Raises:
        ValueError: a pattern that chooses none; names the networks.
    """
    keys = [(name, mode) for mode in (INFERENCE, TRAINING) for name in NETWORKS]
    chosen: list[Key] = []
    for pattern in patterns:
        found = [key for key in keys if fnmatch.fnmatch("/".join(key), f"*{pattern}*")]
        if not found:
            raise ValueError(
                f"--cases: {pattern!r} matches none of the models: {', '.join(NETWORKS)}, "
                f"each with /{INFERENCE} and /{TRAINING}"
            )
        chosen += found
    return [key for key in keys if key in chosen] if patterns else keys


class Worker:
    """A process that compiles and measures one model in one mode."""

    def __init__(self, key: Key, device: torch.device, *, quick: bool) -> None:
        self.key, self.is_ready, self.has_ended = key, False, False
        self.failed: dict[str, str] = {}
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        # As many processes as models: none of them needs threads of its own to keep all cores busy.
        single = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, single):
            given = (theirs, *key, device, quick)
            self._process = context.Process(target=worker.work, args=given)
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


class Measured:
    """Some models on one device.

    Attributes:
        found: case -> what was measured.
        failed: case or process -> the exception.
        not_reached: case -> why not.
    """

    def __init__(self, keys: Sequence[Key], device: torch.device, *, quick: bool) -> None:
        self.keys, self.device, self.quick = keys, device, quick
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.not_reached: dict[str, str] = {}

    def cases(self) -> list[Case]:
        """All of them."""
        return [case for key in self.keys for case in worker.cases(*key, quick=self.quick)]

    def measure(self, budget_s: float, report: Callable[[str, dict[str, Any]], None]) -> None:
        """Start all, let one after another measure; `report` is told each case."""
        begin = time.monotonic()
        end = begin + budget_s
        started = sorted(self.keys, key=lambda key: key[0] not in _SLOW_COMPILERS)
        workers = {key: Worker(key, self.device, quick=self.quick) for key in started}
        try:
            self._compile(workers.values(), begin, budget_s)
            # Those that are late still compile beside the others; their turn is the last.
            for each in sorted((workers[key] for key in self.keys), key=lambda each: not each.is_ready):
                each.wait(end)
                if each.is_ready:
                    for case, result in each.measure(end):
                        self.found[case] = result
                        report(case, result)
                self._note(each, end)
        finally:
            for each in workers.values():
                each.end()

    @staticmethod
    def _compile(workers: Iterable[Worker], begin: float, budget_s: float) -> None:
        for each in workers:
            each.wait(begin + _STOP * budget_s)
        late = [each for each in workers if not each.is_ready]
        for each in late:
            each.tell("stop")
        for each in late:
            each.wait(begin + _WAIT * budget_s)

    def _note(self, each: Worker, end: float) -> None:
        """What one of them has not measured."""
        self.failed |= each.failed
        if each.has_ended:
            self.failed["/".join(each.key)] = "the process ended"
        why = "no time left" if each.is_ready and time.monotonic() >= end else "not compiled in time"
        for case in map(str, worker.cases(*each.key, quick=self.quick)):
            if case not in self.found and case not in self.failed:
                self.not_reached[case] = why

    @property
    def wrong(self) -> list[str]:
        """Cases whose results are further from float64 than they may be."""
        return [case for case, result in self.found.items() if not result["right"]]

    def missed(self) -> list[str]:
        """Ratios below their bars. A quick run has none: its batches are too small."""
        return [
            f"{case}: {ratio} {self.found[str(case)][ratio]:.3f}, wanted {bar(case, ratio)}"
            for case in self.cases()
            for ratio in _RATIOS
            if str(case) in self.found and not self.quick and self.found[str(case)][ratio] < bar(case, ratio)
        ]

    def geomeans(self) -> dict[str, dict[str, float | None]]:
        """By precision, mode and size of the batch."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for case in self.cases():
            if str(case) in self.found:
                size = "large" if case.is_large else "small"
                name = f"{case.precision}/{case.mode}/{size}"
                groups.setdefault(name, []).append(self.found[str(case)])
        return {
            name: {ratio: geomean([result[ratio] for result in group]) for ratio in _RATIOS}
            for name, group in groups.items()
        }

    def record(self, about: Mapping[str, Any], *, complete: bool) -> Record:
        """The run as plain data."""
        figures = {
            "layers": {name: NETWORKS[name].layers for name, _ in self.keys},
            "geomeans": self.geomeans(),
            "missed": self.missed(),
            "wrong": self.wrong,
            "failed": self.failed,
            "not_reached": self.not_reached,
            "cases": self.found,
        }
        effort = {"turns": worker.TURNS, "least_ms": worker.LEAST_MS, "quick": self.quick}
        return Record("models", about, METHOD, effort, {}, [], figures, complete)

    def tables(self) -> list[Table]:
        """Cases by mode, and geometric means."""
        columns = ("case", "eager ms", "fuse ms", "ratio", "compile ms", "backend ms", "ratio", "right")
        found = [
            Table(f"Whole models, {mode}", columns, [_row(case, self.found[case]) for case in names])
            for mode in (INFERENCE, TRAINING)
            if (names := [case for case in self.found if f"/{mode}/" in case])
        ]
        rows = [
            [name, *(f"{value:.3f}" for value in each.values())] for name, each in self.geomeans().items()
        ]
        return [*found, Table("Geometric means", ("cases", *_RATIOS), rows)]

    def remarks(self) -> list[str]:
        """What is slower than wanted, wrong, failed, or was not reached."""
        return [
            *(f"missed: {text}" for text in self.missed()),
            *(f"WRONG: {case}: {self.found[case]['errors']}" for case in self.wrong),
            *(f"FAILED: {name}: {why}" for name, why in self.failed.items()),
            *(f"not reached: {name}: {why}" for name, why in self.not_reached.items()),
        ]


def bar(case: Case, ratio: str) -> float:
    """What is wanted of a ratio: nowhere slower; of transformers at their large batch, more in inference."""
    if NETWORKS[case.network].is_transformer and case.is_large and case.mode == INFERENCE:
        if case.precision == "fp32_highest":
            return 2.0
        if case.precision == "bf16" and ratio == "fuse_vs_eager":
            return 1.03
    return _RATIOS[ratio]


def _row(case: str, result: Mapping[str, Any]) -> list[str]:
    ms = {name: f"{value:.3f}" for name, value in result["ms"].items()}
    fuse, backend = (f"{result[ratio]:.3f}" for ratio in _RATIOS)
    right = "yes" if result["right"] else "NO"
    return [case, ms["eager"], ms["fuse"], fuse, ms["compile"], ms["backend"], backend, right]


def main(run: Run) -> int:
    """Measure the models chosen, kept after each case; 1 if a result is wrong or missing."""
    options, device = run.options, run.device
    models = Measured(select(options.cases), device, quick=options.quick or device.type == "cpu")
    run.announce()
    with shown_progress(len(models.cases())) as progress:

        def keep(case: str, result: Mapping[str, Any]) -> None:
            ratios = f"fuse {result['fuse_vs_eager']:.3f}, backend {result['backend_vs_compile']:.3f}"
            progress(f"{case}: {ratios}{'' if result['right'] else ', WRONG'}", True)
            if options.output:
                models.record(run.about, complete=False).write(options.output)

        budget = MODELS_TIME_BUDGET_S if options.time_budget is None else options.time_budget
        models.measure(budget, keep)
    record = models.record(run.about, complete=True)
    record.finish(run.console, options.output, models.tables(), models.remarks())
    return bool(models.wrong or models.failed)
