"""Measure what each primitive of a functor takes of a multiprocessor, and fit csrc/epilogue/costs.def to it.

    python -m tools.fit_costs --output DIR              # on a GPU: the record
    python -m tools.fit_costs --table DIR/summary.json  # the planner's table, made of that record

In the elementwise kernel and in each family's tile: of each kernel the time with a functor less that with the cheapest
one, at K = 256, under a plan that is forced: in cycles an element. Then random functors, to which nothing was fitted:
what the sum over their primitives says against what they take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import environment
from benchmarks.harness.report import Record, Table, number, progress, show
from benchmarks.harness.runner import Bench, Budget, describe_error
from benchmarks.harness.timing import Effort, in_turn
from epigemm.arguments.calls import LinearCall
from epigemm.calls import elementwise_kernels
from epigemm.calls.resolve import forced
from epigemm.epilogues.registry import typed
from epigemm.linker import cubins, loader
from epigemm.linker.libraries import side_by_side
from epigemm.planner import dry_runs
from tools import cost_table
from tools.cost_functors import PLAIN, PRIMITIVES, Functor, bare, random_functors, repeated
from tools.cost_table import COLUMNS, Costs

METHOD = (
    "CUDA events, L2 flushed, functors in turn with the bare one; cycles of a multiprocessor at its highest clock for "
    "an element of the result, M = 128 a multiprocessor, N = 2048, K = 256"
)
K, N, ROWS_OF_MULTIPROCESSOR = 256, 2048, 128
_EFFORT = Effort(rounds=9, min_ms=0.0, max_rounds=9)
_AT_ONCE = 8  # functors that are in turn with a bare one
_SEED, _RANDOM = 31, 50
_ASSUMED_CLOCK_KHZ = 1980e3
_MOST_REPEATS = 16
_LINKING = 0.6  # of the time budget, the share after which nothing more is linked
_CHECKED = ("cooperative", "cooperative_16", "swap_ab_16", "slices", "elementwise_16")  # by random functors


@dataclass(frozen=True)
class Kernel:
    """One column of the table: a kernel, and the arithmetic that it is measured in."""

    column: str
    dtype: torch.dtype
    precision: str
    plan: tuple[
        int, ...
    ]  # arithmetic, family, tile, raster, swizzle, splits; of the elementwise kernel empty
    cycles: float  # that a functor is repeated to take at least: beside memory, or to be seen
    share: float = 1.0  # of the multiprocessor that computes an element: half the warps of ping-pong tiles


_IEEE, _TF32, _SPLIT = range(3)  # by `dry_runs.ARITHMETICS`
_TMA, _SWAP_AB, _SLICES = range(3)  # csrc/gemm/families.def
_16, _32 = torch.bfloat16, torch.float32
# Tiles of 128x256, cooperative, and of 128x128, ping-pong; of 64x128; of 128x128, cooperative.
KERNELS = (
    Kernel("elementwise", _32, "high", (), 1.5),
    Kernel("elementwise_16", _16, "high", (), 1.0),
    Kernel("cooperative", _32, "high", (_TF32, _TMA, 0, 0, 1, 1), 0.3),
    Kernel("cooperative_16", _16, "high", (_IEEE, _TMA, 0, 0, 1, 1), 0.3),
    Kernel("pingpong", _32, "high", (_TF32, _TMA, 4, 0, 1, 1), 0.6, 0.5),
    Kernel("pingpong_16", _16, "high", (_IEEE, _TMA, 4, 0, 1, 1), 0.6, 0.5),
    Kernel("swap_ab", _32, "high", (_TF32, _SWAP_AB, 4, 0, 1, 1), 0.3),
    Kernel("swap_ab_16", _16, "high", (_IEEE, _SWAP_AB, 4, 0, 1, 1), 0.3),
    Kernel("slices", _32, "highest", (_SPLIT, _SLICES, 0, 0, 1, 1), 0.3),
)
assert tuple(kernel.column for kernel in KERNELS) == COLUMNS


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 1 if a primitive could not be measured, 2 for wrong usage."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, metavar="DIR", help="the folder of the record")
    p.add_argument(
        "--table", type=Path, metavar="SUMMARY", help="measure nothing: write costs.def of a record"
    )
    p.add_argument(
        "--primitives", nargs="+", default=["mul", *PRIMITIVES], metavar="NAME", help="default: all"
    )
    p.add_argument("--time-budget", type=float, metavar="S", help="after so many seconds start nothing more")
    p.add_argument(
        "--trees", metavar="csrc=HASH,python=HASH", help="of the source, for a machine without git"
    )
    options = p.parse_args(arguments)
    if options.table:
        summary = json.loads(options.table.read_text())
        if summary.get("kind") != "functors":
            p.error(f"--table: expected a record of this tool, got one of {summary.get('kind')!r}")
        costs, source = cost_table.updated(cost_table.read(), summary)
        cost_table.PATH.write_text(cost_table.text(costs, source))
        show([], [f"wrote {cost_table.PATH.name}: {source}"])
        return 0
    if unknown := sorted({*options.primitives} - {"mul", *PRIMITIVES}):
        p.error(f"--primitives: got {', '.join(unknown)}; accepted are mul, {', '.join(PRIMITIVES)}")
    if not torch.cuda.is_available():
        p.error("needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    about = environment.describe(device, options.trees) | {"command": ["python", "-m", "tools.fit_costs"]}
    effort = {"rounds": _EFFORT.rounds, "seed": _SEED, "random": _RANDOM}
    record = Record("functors", about, METHOD, options.output, effort)
    return measure(Sweep(Bench(device, _EFFORT), options.time_budget), options.primitives, record)


def measure(sweep: Sweep, names: Sequence[str], record: Record) -> int:
    """Fill a record, kept after each kernel; 1 if a primitive could not be measured."""
    before, drawn = cost_table.read(), random_functors(_SEED, _RANDOM)
    with torch.no_grad():
        wanted = {kernel.column: _repeats(names, before, kernel) for kernel in KERNELS}
        sweep.link(wanted, drawn)
        told = progress(len(KERNELS))
        for kernel in KERNELS:
            sweep.primitives(kernel, wanted[kernel.column], before)
            if kernel.column in _CHECKED:
                sweep.random(kernel, drawn, before)
            record.figures = sweep.figures()
            record.write()
            told(kernel.column)
    record.finish(_tables(record), [f"{name}: {why}" for name, why in sweep.failed.items()])
    return int(bool(sweep.failed))


def _repeats(names: Sequence[str], costs: Costs, kernel: Kernel) -> list[tuple[str, Functor]]:
    """Each primitive as often as the time can be seen."""
    found = []
    for name in names:
        expected = max(costs.get(name, {}).get(kernel.column, 0.0), 1e-3)
        times = max(1, min(round(kernel.cycles / expected), _MOST_REPEATS))
        found.append((name, _functor(name, times)))
    return found


_functors: dict[tuple[str, int], Functor] = {}


def _functor(name: str, times: int) -> Functor:
    if (name, times) not in _functors:
        _functors[name, times] = repeated(name, times)
    return _functors[name, times]


@dataclass
class Sweep:
    """What has been measured: by column, in microseconds and in cycles."""

    bench: Bench
    budget_s: float | None = None
    costs: Costs = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)  # of random functors, by name
    failed: dict[str, str] = field(default_factory=dict)
    unlinked: set[tuple[str, str]] = field(
        default_factory=set
    )  # functors and columns that there was no time for

    def __post_init__(self) -> None:
        about = torch.cuda.get_device_properties(self.bench.device)
        self.multiprocessors = int(about.multi_processor_count)
        # The planner counts in cycles of the highest clock.
        self.clock_mhz = float(getattr(about, "clock_rate", 0) or _ASSUMED_CLOCK_KHZ) / 1e3
        self.rows = ROWS_OF_MULTIPROCESSOR * self.multiprocessors
        self.budget = Budget(self.budget_s)
        self.bare = bare()

    def figures(self) -> dict[str, Any]:
        """Of the summary."""
        return {
            "clock_mhz": self.clock_mhz,
            "multiprocessors": self.multiprocessors,
            "primitives": self.costs,
            "random": self.checks,
            "check": _judged(self.checks),
            "failed": self.failed,
        }

    # --- calls -------------------------------------------------------------------------------------------------------

    def tensors(self, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight and out; the product's elements are of size 1."""
        generator = torch.Generator(self.bench.device).manual_seed(self.bench.seed)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.bench.device)
            return drawn.to(kernel.dtype)

        if not kernel.plan:
            z = normal(self.rows, N)
            return z, z, torch.empty_like(z)
        out = torch.empty((self.rows, N), dtype=kernel.dtype, device=self.bench.device)
        return normal(self.rows, K), normal(N, K) / K**0.5, out

    def call(self, kernel: Kernel, functor: Functor, tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """The functor in a kernel."""
        if not kernel.plan:
            return partial(functor.epilogue.elementwise, tensors[0], 1.01, out=tensors[2])
        return forced(self.linear(kernel, functor, tensors), kernel.plan)

    def linear(self, kernel: Kernel, functor: Functor, tensors: tuple[Tensor, ...]) -> LinearCall:
        """The linear call of a functor."""
        x, weight, out = tensors
        made = typed(functor.epilogue.traced, [True])
        return LinearCall(made, x, weight, [1.01], kernel.precision, out=out)

    def missing(self, kernel: Kernel, functor: Functor, tensors: tuple[Tensor, ...]) -> list[str]:
        """The kernels that a functor has to be linked into."""
        if not kernel.plan:
            made = typed(functor.epilogue.traced, [True])
            return list(filter(None, elementwise_kernels.missing(made, tensors[0]).split(",")))
        call = self.linear(kernel, functor, tensors)
        return dry_runs.dry_run(call, dry_runs.ALL_KEPT, plan=kernel.plan).missing

    def link(
        self,
        wanted: Mapping[str, Sequence[tuple[str, Functor]]],
        drawn: Sequence[Functor],
    ) -> None:
        """Make all kernels ahead, in threads, and keep them on disk; the primitives' first."""
        capability = torch.cuda.get_device_capability(self.bench.device)
        wanted_jobs: dict[cubins.Job, list[tuple[str, str]]] = {}
        for is_drawn in (False, True):
            for kernel in KERNELS:
                tensors = self.tensors(kernel)
                functors = [self.bare, *(each for _, each in wanted[kernel.column])]
                for functor in (drawn if kernel.column in _CHECKED else ()) if is_drawn else functors:
                    with suppress(RuntimeError):  # said when it is called
                        missing = self.missing(kernel, functor, tensors)
                        for job in loader._jobs(typed(functor.epilogue.traced, [True]), missing, capability):
                            wanted_jobs.setdefault(job, []).append((functor.name, kernel.column))
        started, limit = time.monotonic(), _LINKING * (self.budget_s or float("inf"))

        def make(job: cubins.Job) -> bool:
            is_in_time = time.monotonic() - started < limit
            if is_in_time:
                with suppress(Exception):  # said when it is called
                    cubins.cubin(*job)
            return is_in_time

        are_made = side_by_side(make, list(wanted_jobs))
        show([], [f"{sum(are_made)} of {len(are_made)} kernels linked in {time.monotonic() - started:.0f} s"])
        for of_job, is_made in zip(wanted_jobs.values(), are_made, strict=True):
            self.unlinked.update(() if is_made else of_job)

    # --- times -------------------------------------------------------------------------------------------------------

    def times(self, kernel: Kernel, functors: Sequence[Functor]) -> Iterator[tuple[Functor, float, float]]:
        """Each functor with its time and that of the bare one beside it, in microseconds."""
        tensors = self.tensors(kernel)
        plain = self.call(kernel, self.bare, tensors)
        for start in range(0, len(functors), _AT_ONCE):
            ready = []
            for functor in functors[start : start + _AT_ONCE]:
                try:
                    why = self.budget.why_spent()
                    if why or (functor.name, kernel.column) in self.unlinked:
                        raise RuntimeError(why or "not linked: the time budget was spent")
                    run = self.call(kernel, functor, tensors)
                    run()
                    ready.append((functor, run))
                except Exception as error:  # one that fails must not take the others with it
                    self.failed[f"{functor.name} {kernel.column}"] = describe_error(error)
            if ready:
                runs = [plain, *(run for _, run in ready)]
                host_us = max(self.bench.timer.host_us(run) for run in runs)
                samples = in_turn(self.bench.timer, runs, self.bench.effort, host_us)
                us = [1e3 * statistics.median(each) for each in samples]
                yield from ((functor, own, us[0]) for (functor, _), own in zip(ready, us[1:], strict=True))

    def cycles(self, kernel: Kernel, us: float, bare_us: float) -> float:
        """What a functor takes more than the bare one: beside memory, as the planner's fourth powers have it."""
        more = us - bare_us
        if not kernel.plan:
            more = max(us**4 - bare_us**4, 0.0) ** 0.25
        elements = self.rows * N / self.multiprocessors
        return more * self.clock_mhz / elements / kernel.share

    def microseconds(self, kernel: Kernel, cycles: float, bare_us: float) -> float:
        """The other way round: what so many cycles an element take more than the bare functor."""
        us = cycles * kernel.share * self.rows * N / self.multiprocessors / self.clock_mhz
        return us if kernel.plan else float((us**4 + bare_us**4) ** 0.25 - bare_us)

    def primitives(self, kernel: Kernel, wanted: Sequence[tuple[str, Functor]], before: Costs) -> None:
        """A column of the table."""
        column = kernel.column
        names = {functor.name: name for name, functor in wanted}
        product = before["mul"][column]
        # A product first: the others are with some.
        ordered = sorted((functor for _, functor in wanted), key=lambda each: names[each.name] != "mul")
        found = []
        for functor, us, bare_us in self.times(kernel, ordered):
            found.append((names[functor.name], functor, self.cycles(kernel, us, bare_us)))
        for name, functor, cycles in found:
            parts = functor.primitives
            count = parts.count(name)
            # The bare functor has a product, too.
            others = sum(PLAIN.get(part, 0) for part in parts if part != name) - 1
            own = (cycles - product * others) / count if name != "mul" else cycles / (count - 1)
            self.costs.setdefault(name, {})[column] = own = max(own, 0.0)
            if name == "mul":
                product = own
        if product:
            for name, times in PLAIN.items():
                self.costs.setdefault(name, {})[column] = times * product

    def random(self, kernel: Kernel, drawn: Sequence[Functor], before: Costs) -> None:
        """Random functors: what the column says of them, and what they take."""
        column = kernel.column

        def cost(name: str, column: str) -> float:
            measured = self.costs.get(name, {})
            if column in measured:
                return cost_table.fused(measured, column)
            return before.get(name, before[cost_table.OTHER])[column]

        for functor, us, bare_us in self.times(kernel, drawn):
            # As the planner: a functor whose result would be too inexact has float's functions in 16 bits, too.
            of = column if functor.has_short_forms else column.removesuffix("_16")
            predicted = sum(cost(name, of) for name in functor.primitives) - cost("mul", of)
            self.checks.setdefault(functor.name, {"text": functor.text, "made_of": functor.primitives})[
                column
            ] = {
                "measured_us": us - bare_us,
                "predicted_us": self.microseconds(kernel, predicted, bare_us),
                "bare_us": bare_us,
            }


def _judged(checks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How far predictions are off, relatively: in the kernels with a product, and by column."""
    errors: dict[str, list[float]] = {}
    for each in checks.values():
        for column in COLUMNS:
            if column in each and each[column]["measured_us"] > 0:
                found = each[column]
                error = abs(found["predicted_us"] - found["measured_us"]) / found["measured_us"]
                errors.setdefault(column, []).append(error)
    fused = [error for column, of in errors.items() if "elementwise" not in column for error in of]
    columns = {column: _middle_and_worst(of) for column, of in errors.items()}
    return {**_middle_and_worst(fused), "by_column": columns}


def _middle_and_worst(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"points": 0, "median_error": None, "worst_error": None}
    return {
        "points": len(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
    }


def _tables(record: Record) -> list[Table]:
    costs, check = record.figures["primitives"], record.figures["check"]
    rows = [[name, *(number(costs[name].get(column)) for column in COLUMNS)] for name in sorted(costs)]
    judged = [
        [column, str(of["points"]), number(of["median_error"]), number(of["worst_error"])]
        for column, of in [*check["by_column"].items(), ("all with a product", check)]
    ]
    return [
        Table("Cycles an element", ("primitive", *COLUMNS), rows),
        Table("Random functors", ("kernel", "points", "median error", "worst error"), judged),
    ]


if __name__ == "__main__":
    sys.exit(main())
