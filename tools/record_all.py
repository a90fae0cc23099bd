"""Make all records of one tree, job after job, in a given time: first the checks, then the measurements.

    python -m tools.record_all --list
    python -m tools.record_all --output DIR --time-budget 1500
    python -m tools.record_all --output DIR --time-budget 1500     # once more: what is left
    python -m tools.record_all --output DIR --only suite models    # parts of names

A job is started if what it usually takes on an H100 with 16 cores fits into what is left of the budget, and is stopped
where the budget ends. `DIR/record_all.json` says after every job how each one ended. A job that ended well is not run
again for the same trees, nor is a shard of one that was stopped. Each job's output is in `DIR/NAME.log`. Shards of
the suite and of compute-sanitizer are merged by `tools/merge_records.py` once all of them are there.

exit status: 0 all chosen jobs ended well, 1 one failed or is left
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import environment

PROCESSES = len(os.sched_getaffinity(0))
"""As many as cores. On a machine of several GPUs `taskset` and CUDA_VISIBLE_DEVICES give each GPU a run of its own."""
SUITE = range(1, 5)  # shards of the suite, one after the other, or side by side on several GPUs
SHARDS = 45  # of compute-sanitizer, a process each
LEFT = "{left}"  # in a command: the seconds that its job may take, less those that it needs to end
ENDING_S = 30
_WRITING_S = 8.0  # how long an interrupted command may take to write its record, within its limit
Run = Callable[[Sequence[str], Path, float], int]
"""A command, the file for its output, and how many seconds it may take; its exit status, 124 where it took longer."""


@dataclass(frozen=True)
class Job:
    """Commands that run side by side, and how long that usually takes."""

    name: str
    usual_s: int
    commands: tuple[tuple[str, ...], ...]
    merged: str = ""  # the record to merge from the job's, where it has several


@dataclass(frozen=True)
class Ended:
    """How a job ended: "done", "failed", "timeout"; and which of its commands ended well, each by its index."""

    status: str
    seconds: float
    trees: str
    done: Sequence[int] = ()


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def _suite(index: int, output: Path, trees: str) -> Job:
    shard = ("--shard", f"{index}/{len(SUITE)}", "--summary-json", str(output / f"tests-{index}.json"))
    # worksteal: neighbours run in one process, which makes what a file's tests share once.
    processes = ("-n", str(PROCESSES), "--dist", "worksteal")
    options = ("-m", "gpu", *processes, "-v", "-rf", "-p", "no:cacheprovider")
    shown = ("--tb=short", "--durations=30")
    command = _python("pytest", "tests", *options, *shown, *shard, "--trees", trees)
    return Job(f"suite-{index}", 280, (command,))


def _sanitizer(tool: str, linked: bool, trees: str) -> Job:
    script, count = ("tools.run_linked_kernels", 2) if linked else ("tools.run_every_kernel", SHARDS)
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    commands = tuple(
        (found, "--tool", tool, *_python(script, "--shard", f"{index}/{count}", "--trees", trees))
        for index in range(1, count + 1)
    )
    name = f"{'linked-' if linked else ''}{tool}"
    return Job(
        name, 30 if linked else 390 if tool == "racecheck" else 240, commands, f"compute-sanitizer-{name}.txt"
    )


def jobs(output: Path, trees: str) -> list[Job]:
    """In the order in which they are worth their time."""

    def benchmark(name: str, usual_s: int, *options: str) -> Job:
        where = ("--output", str(output / name), "--trees", trees)
        return Job(name, usual_s, (_python("benchmarks", *options, *where),))

    def models(variant: str, mode: str) -> Job:
        options = ("--models", "--variants", variant, "--cases", f"*/{mode}/*", "--time-budget", LEFT)
        return benchmark(f"models-{variant}-{mode}", 150, *options)  # what is left is for the next time

    def command(module: str, where: Path, *options: str) -> tuple[tuple[str, ...]]:
        return (_python(module, *options, "--output", str(where), "--trees", trees),)

    # A layer with BatchNorm in training where the host is the limit.
    few_rows = ("--cases", "linear/scale_batch_norm:train", "--sizes", "64x8192x8192", "64x4096x4096")
    others = ("--cases", "custom/*", "glu/*")
    peers = ("--random", "91", "--short", "--count", "8", "--peers", "eager", "mm", "quack")
    launches = command(
        "tools.random_launches", output / "launches.json", "--count", "5000", "--time-budget", LEFT
    )
    return [
        *(_suite(index, output, trees) for index in SUITE),
        *(_sanitizer(tool, False, trees) for tool in ("memcheck", "racecheck")),
        *(_sanitizer(tool, True, trees) for tool in ("memcheck", "racecheck")),
        models("eager_options", "inference"),
        models("eager_options", "training"),
        benchmark("host", 40, "--host"),
        benchmark("short", 120, "--random", "91", "--short", "--time-budget", LEFT),
        benchmark("bench", 120),
        benchmark("few-rows", 20, *few_rows),
        benchmark("random", 300, "--random", "92", "--between", "--time-budget", LEFT),
        models("whole", "inference"),
        models("backend", "inference"),
        models("overhead", "inference"),
        Job("launches", 300, launches),
        Job("gradings", 240, command("benchmarks.gradings", output / "gradings")),
        benchmark("others", 300, *others),
        benchmark("quack", 120, *peers, "--time-budget", LEFT),
        benchmark("plans", 300, "--plans", "--random", "92", "--count", "100", "--time-budget", LEFT),
    ]


def run_command(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run one, with one thread a process: there are as many processes as cores.

    Where it takes too long, it is interrupted, as by the keyboard, so that it can write what it has. Its other
    processes, such as pytest's workers, are ended with it.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        writing_s = min(_WRITING_S, limit_s / 2)
        try:
            return process.wait(limit_s - writing_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(writing_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def end(job: Job, output: Path, trees: str, left_s: float, run: Run, done: Sequence[int] = ()) -> Ended:
    """Run a job to its end but for the commands that are done, and merge its records."""
    started = time.monotonic()
    several = len(job.commands) > 1
    names = [f"{job.name}-{index}" for index in range(1, 1 + len(job.commands))] if several else [job.name]
    logs = [output / f"{name}.log" for name in names]

    def one(index: int) -> int:
        command, log = job.commands[index], logs[index]
        left = left_s - (time.monotonic() - started)
        given = str(max(1, int(left - ENDING_S)))
        return run([given if word == LEFT else word for word in command], log, left) if left > 0 else 124

    with ThreadPoolExecutor(PROCESSES) as pool:
        open_ = [index for index in range(len(job.commands)) if index not in done]
        statuses = dict(zip(open_, pool.map(one, open_), strict=True))
    well = sorted({*done, *(index for index, status in statuses.items() if not status)})
    failed = next((status for status in statuses.values() if status), 0)
    if not failed and job.merged:
        merge = _python("tools.merge_records", str(output / job.merged), *map(str, logs))
        failed = run(merge, output / f"{job.name}.log", 60)
    status = {0: "done", 124: "timeout"}.get(failed, "failed")
    return Ended(status, round(time.monotonic() - started, 1), trees, well)


def _merge_suite(output: Path, run: Run) -> int:
    parts = [str(output / f"tests-{index}.json") for index in SUITE]
    merge = _python("tools.merge_records", str(output / "tests.json"), *parts)
    return run(merge, output / "suite.log", 60)


def record(
    chosen: Sequence[Job], output: Path, trees: str, budget_s: float, run: Run = run_command
) -> dict[str, Ended]:
    """Run what is left of these jobs; how each of them ended."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "record_all.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    ended = {name: Ended(**fields) for name, fields in earlier.items() if fields["trees"] == trees}
    deadline = time.monotonic() + budget_s
    for job in chosen:
        if job.name in ended and ended[job.name].status == "done":
            continue
        left = deadline - time.monotonic()
        done = ended[job.name].done if job.name in ended else ()
        usual_s = round(job.usual_s * (1 - len(done) / len(job.commands)))
        if usual_s > left:
            print(f"{job.name}: left, for it takes {usual_s} s", flush=True)
            continue
        ended[job.name] = end(job, output, trees, left, run, done)
        print(f"{job.name}: {ended[job.name].status} in {ended[job.name].seconds:.0f} s", flush=True)
        text = json.dumps({name: asdict(each) for name, each in ended.items()}, indent=1)
        file.write_text(text + "\n", encoding="utf-8")
    suite = [ended.get(f"suite-{index}") for index in SUITE]
    if all(each and each.status == "done" for each in suite):
        _merge_suite(output, run)
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/records"), help="folder (default: build/records)"
    )
    parser.add_argument("--time-budget", type=float, default=3600, help="seconds (default: 3600)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="jobs, or parts of their names")
    parser.add_argument(
        "--trees", help="csrc=HASH,python=HASH: git trees of the source, where git is missing"
    )
    parser.add_argument("--list", action="store_true", help="print the jobs and what they take, and run none")
    options = parser.parse_args(arguments)
    known = environment.parse_trees(options.trees) if options.trees else environment.source_trees()
    if known.get("modified", not known):
        parser.error("the source is not that of its commit, or git is missing: commit, or give --trees")
    trees = ",".join(f"{name}={known[name]}" for name in ("csrc", "python"))
    every = jobs(options.output, trees)
    chosen = [job for job in every if not options.only or any(part in job.name for part in options.only)]
    if options.list:
        print("\n".join(f"{job.name:28} {job.usual_s:4} s" for job in chosen))
        return 0
    ended = record(chosen, options.output, trees, options.time_budget)
    return int(any(job.name not in ended or ended[job.name].status != "done" for job in chosen))


if __name__ == "__main__":
    raise SystemExit(main())
