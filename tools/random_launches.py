"""Thousands of random launches, each held against float64: every kernel, ragged shapes, any strides and alignment.

    python -m tools.random_launches --count 5000 --output launches.json
    python -m tools.random_launches --count 5000 --shard 1/4 --output launches-1.json
    python -m tools.random_launches --seed 7 --only 1234     # that one again

Processes of their own launch, a batch each: one that hangs or dies is replaced, and its launch reported.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment
from benchmarks.harness.report import SCHEMA, progress, write_json
from benchmarks.harness.shards import Selection, Shard
from tools import launches
from tools.launches import Launch, Outcome
from tools.run_every_kernel import kernels

BATCH, LIMIT_S, START_S, ENDING_S = 500, 60.0, 300.0, 30.0
"""Launches of one process; seconds for one of them, linking included; for its start; for its end, once it is ending."""
LINES = 12
"""Of what a process that has ended wrote to stderr, how many are reported."""


def work(line: Connection, device: torch.device, errors: str) -> None:
    """The process: launches that it is sent, one at a time. `errors`: the file that takes the place of its stderr."""
    with Path(errors).open("wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    # Of the fallback: cuBLAS else adds up parts of K in 16 bits, and leaves the bound.
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    line.send("up")
    while True:
        try:
            launch = line.recv()
        except EOFError:
            return
        line.send(launches.described(launch, device))


class NotStarted(Exception):
    """A process that launches did not start: no later one would."""


class Worker:
    """A process that launches.

    Raises:
        NotStarted: it has ended, or says nothing.
    """

    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        handle, name = tempfile.mkstemp(prefix="random_launches_")
        os.close(handle)
        self._errors = Path(name)
        self._has_closed = False
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, device, name))
        self._process.start()
        theirs.close()
        if self._hear(START_S) != "up":
            raise NotStarted(self.end() or f"it says nothing in {START_S:g} s")

    def launch(self, launch: Launch, limit_s: float) -> Outcome | None:
        """What came of it; None where the process says nothing in time, or has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._line.send(launch)
        found = self._hear(limit_s)
        return found if isinstance(found, Outcome) else None

    def _hear(self, limit_s: float) -> object:
        try:
            return self._line.recv() if self._line.poll(limit_s) else None
        except (EOFError, ConnectionResetError):
            self._has_closed = True
            return None

    def end(self) -> str:
        """At once; how it had ended by itself, if it had, and the end of its stderr."""
        if self._has_closed:  # before it ends: it may wait for a GPU that others use
            self._process.join(ENDING_S)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        written = self._errors.read_text(errors="replace").splitlines()[-LINES:]
        self._errors.unlink()
        return "" if code is None else "\n".join([f"the process ended with {code}", *written])


@dataclass
class Found:
    """What came of launches."""

    launched: int = 0
    left_out: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""  # why no more could be launched

    def add(self, launch: Launch, outcome: Outcome) -> None:
        """Of one more."""
        self.launched += 1
        self.kernels[outcome.kernel or "planned"] += 1
        if outcome.refused:
            self.refused[outcome.refused] += 1
        if outcome.wrong:
            plan = launch.plan()
            entry = {"number": launch.number, "launch": str(launch), "plan": plan and list(plan)}
            self.failed.append(entry | {"why": outcome.wrong})
            print(f"FAILED: {launch}, plan {plan}: {outcome.wrong}", flush=True)


def run(
    every: Sequence[Launch],
    device: torch.device,
    limit_s: float,
    budget_s: float | None,
    start: Callable[[torch.device], Worker] = Worker,
) -> Found:
    """All of them, in batches; none starts once the time is up, or where no process starts.

    `start` makes a process for the device.
    """
    found, begin, told = Found(), time.monotonic(), progress(len(every))
    worker: Worker | None = None
    left = 0
    try:
        for launch in every:
            if budget_s is not None and time.monotonic() - begin > budget_s:
                found.left_out += 1
                continue
            if worker is None or not left:
                if worker is not None:
                    worker.end()
                worker, left = None, BATCH
                worker = start(device)
            left -= 1
            outcome = worker.launch(launch, limit_s)
            if outcome is None:
                why, worker = worker.end() or f"nothing came of it in {limit_s:g} s", None
                outcome = Outcome(wrong=why)
            elif outcome.raised:
                left = 0
            found.add(launch, outcome)
            told(str(launch))
    except NotStarted as error:
        found.stopped = f"no process that launches could start: {error}"
        found.left_out = len(every) - found.launched
    finally:
        if worker is not None:
            worker.end()
    return found


def record(
    given: argparse.Namespace, device: torch.device, found: Found, selection: Selection
) -> dict[str, Any]:
    """What the file holds."""
    about = environment.describe(device, given.trees)
    about["command"] = ["python", "-m", "tools.random_launches", *about["command"][3:]]
    names = {"bf16": "16_bits", "fp16": "16_bits"}
    every = [
        f"{arithmetic} family {family} tile {tile}"
        for arithmetic in launches.SETTINGS
        for family, tile in kernels(names.get(arithmetic, arithmetic))
    ]
    head = {"schema": SCHEMA, "kind": "random_launches", "complete": not found.left_out, "environment": about}
    numbers = {"seed": given.seed, "count": given.count, "largest": given.largest}
    numbers |= {"launched": found.launched, "left_out": found.left_out}
    return (
        head
        | numbers
        | {
            "selection": selection.to_json(),
            "kernels": dict(sorted(found.kernels.items())),
            "never_forced": [name for name in every if name not in found.kernels],
            "refused": dict(found.refused.most_common()),
            "failed": found.failed,
            "stopped": found.stopped,
        }
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m tools.random_launches", description=__doc__.splitlines()[0])
    p.add_argument("--seed", type=int, default=0, help="what all launches are drawn from (default: 0)")
    p.add_argument("--count", type=int, default=5000, help="number of launches (default: 5000)")
    p.add_argument("--only", type=int, metavar="NUMBER", help="run the launch of this number alone")
    p.add_argument(
        "--largest", type=int, default=launches.LARGEST, help="the largest M, N and K (default: 4096)"
    )
    p.add_argument("--shard", type=Shard.parse, default="1/1", help="I/N: the I-th of N parts")
    p.add_argument("--time-budget", type=float, metavar="S", help="start no launch after so many seconds")
    p.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="seconds after which a launch is reported as hanging (60)",
    )
    p.add_argument("--device", default="cuda", help="cuda (default), cuda:1, cpu")
    p.add_argument("--output", type=Path, metavar="FILE", help="write the record to it, as JSON")
    p.add_argument("--trees", help="csrc=HASH,python=HASH: git trees of the source, where git is missing")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch; 1 if anything is wrong, or no process starts."""
    p = parser()
    given = p.parse_args(arguments)
    if min(given.count, given.largest) < 1 or (given.only is not None and given.only < 0):
        p.error("--count and --largest: at least 1, --only: at least 0")
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device(
            "cuda", device.index or 0
        )  # `torch.cuda.set_device` takes none without an index
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.index >= count:
            p.error(f"--device: got {given.device}, but torch sees {count} GPUs")
    numbers = range(given.count) if given.only is None else [given.only]
    chosen = given.shard.part(list(numbers))
    every = [launches.draw(given.seed, number, given.largest) for number in chosen]
    found = run(every, device, given.limit, given.time_budget)
    names = [f"{given.seed} {given.largest} {number}" for number in numbers]
    written = record(given, device, found, Selection.of_names(names, given.shard, len(chosen)))
    if given.output:
        print(f"wrote {write_json(written, given.output)}")
    if found.stopped:
        print(f"FAILED: {found.stopped}", flush=True)
    left_out = f", {found.left_out} left out" * bool(found.left_out)
    left_out += ": the time was up" * (bool(found.left_out) and not found.stopped)
    never = f", {len(written['never_forced'])} kernels never forced"
    print(f"{found.launched} launches, {len(found.failed)} failed{never}{left_out}", flush=True)
    return int(bool(found.failed or found.stopped))


if __name__ == "__main__":
    sys.exit(main())
