"""``--mma``: the mma.sync kernels under forced plans, with and without a functor, beside a bare loop of mma.sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cutlass
from benchmarks.baselines import BASELINES, Alternative, Baseline
from benchmarks.cases import Case, Data, Setting, matching
from benchmarks.cases.mma import (
    FAMILY,
    KIND,
    SETTINGS,
    SPLIT,
    Tile,
    TileCase,
    every_case,
    multiplied,
    problems,
    products,
    tiles,
)
from benchmarks.gradings.products import forced_into
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.environment import gpu_folder
from benchmarks.harness.occupancy import ctas_of_multiprocessor
from benchmarks.harness.records import CUTLASS, LOOP, MM, NO_FUNCTOR, CaseResult
from benchmarks.harness.report import show
from benchmarks.harness.runner import Bench, Judge, Ready, describe_error
from benchmarks.kinds import Run, mma_points
from benchmarks.kinds.bench import failures
from benchmarks.kinds.mma_points import Beside
from epigemm._native import ops
from epigemm.arguments import precision
from epigemm.epilogues.registry import named
from epigemm.linking import cubins
from epigemm.linking.toolchain import side_by_side
from epigemm.packs import weight_packs

_SHARE_OF_LOOP = 0.75
"""About what the kernels reach of the loop's rate: the loop then takes as long as they do."""


class MmaBench(Bench):
    """Whose alternatives are one kernel with several epilogues."""

    def reference(self, case: Case, data: Data) -> Reference:
        """What results are held against."""
        return Reference(case, data, self.seed)

    def check(self, reference: Judge, kind: str, out: Tensor, ready: Ready) -> None:
        """Each with its own epilogue; that of CUTLASS is a bare product."""
        assert isinstance(reference, Reference)
        name = ready.measurement.alternative
        problem = problems()[NO_FUNCTOR if name in (CUTLASS, LOOP, MM) else name]
        super().check(reference.under(problem), kind, out, ready)


def kernel(epilogue: str, case: Case, data: Data, out: Tensor) -> Alternative:
    """The case's tile with an epilogue; `NO_FUNCTOR` is called without a bias."""
    assert isinstance(case, TileCase) and data.weight is not None
    weight, tile = data.weight, case.tile
    bias = None if epilogue == NO_FUNCTOR else data.parameters.vectors["bias"]
    given: dict[str, Any] = {"bias": bias, "plan": tile.plan[1:]}

    def run() -> Tensor:
        if case.setting == SPLIT:  # the pack is made again where the weight has changed
            given["pack"] = weight_packs.keep(weight, weight_packs.SLICES[precision.SPLIT]).buffer
        return forced_into(out, epilogue, data.x, weight, multiplied(case.setting), **given)

    return Alternative(run, 0, kernel=f"{FAMILY} {tile.text}")


class Loop:
    """The bare loop, as long as a product of a case takes."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(1, device=device)
        self._of_step = {is_tf32: self._run(1, is_tf32) for is_tf32 in (False, True)}

    def _run(self, steps: int, is_tf32: bool) -> int:
        return int(ops._multiply_bare_out(steps, self._sums, is_tf32))

    def steps(self, flops: int, is_tf32: bool) -> int:
        """How often it is repeated beside a product of so many operations."""
        return max(1, round(flops / _SHARE_OF_LOOP / self._of_step[is_tf32]))

    def flops(self, flops: int, is_tf32: bool) -> int:
        """What it then computes."""
        return self.steps(flops, is_tf32) * self._of_step[is_tf32]

    def prepare(self, case: Case, data: Data, out: Tensor) -> Alternative:
        """As an alternative."""
        steps = self.steps(work(case), is_tf32 := case.setting.arithmetic == "tf32")

        def run() -> Tensor:
            self._run(steps, is_tf32)
            return self._sums

        return Alternative(run, checked=False)


def work(case: Case) -> int:
    """Operations of the tensor cores."""
    return products(case.setting) * case.flops


def jobs(setting: Setting, tile: Tile, capability: tuple[int, int]) -> list[cubins.Job]:
    """The kernels of a tile, one for each epilogue.

    Raises:
        RuntimeError: this build does not have the tile.
    """
    is_fp32 = setting.dtype == torch.float32
    operand = multiplied(setting) if is_fp32 else str(setting.dtype).removeprefix("torch.")
    symbol = f"epigemm_open_{FAMILY}_{operand}_{tile.number}"
    path = cubins.ir_path(symbol)
    if path is None:
        raise RuntimeError(f"this build has no kernel {symbol}")
    epilogues = [epilogue for name in problems() if (epilogue := named(name))]
    return [cubins.Job(each.source(symbol), symbol, path, capability) for each in epilogues]


def ctas_at_once(of_tile: Sequence[cubins.Job], tile: Tile, multiprocessors: int) -> int:
    """How many CTAs of a tile the current GPU runs at once: with the epilogue that lets it run most."""
    return multiprocessors * max(
        ctas_of_multiprocessor(cubins.cubin(*job), job.symbol, tile.shared_bytes) for job in of_tile
    )


def occupancy(run: Run) -> tuple[dict[tuple[Setting, Tile], int], dict[str, str]]:
    """`ctas_at_once` of every tile, and why others cannot run."""
    device, capability = torch.cuda.current_device(), torch.cuda.get_device_capability()
    wanted = [(setting, tile) for setting in SETTINGS for tile in tiles(setting, device=device)]

    def link(job: cubins.Job) -> None:
        with suppress(Exception):  # said below
            cubins.cubin(*job)

    with suppress(RuntimeError):
        side_by_side(link, [job for each in wanted for job in jobs(*each, capability)])
    found, failed = {}, {}
    for setting, tile in wanted:
        try:
            of_tile = jobs(setting, tile, capability)
            found[setting, tile] = ctas_at_once(of_tile, tile, run.multiprocessors)
        except Exception as error:  # a tile that fails must not take the others with it
            failed[f"{setting} {tile.text}"] = describe_error(error)
    return found, failed


def every_baseline(loop: Loop, cutlass_dir: str) -> list[Baseline]:
    """The kernel with each epilogue, then what is beside it."""
    own = [
        Baseline(name, f"{FAMILY}, {problem.formula}", partial(kernel, name))
        for name, problem in problems().items()
    ]
    bare = Baseline(LOOP, "a bare loop of mma.sync", loop.prepare)
    return [*own, bare, BASELINES[MM], cutlass.baseline(cutlass_dir)]


def folder(output: Path | None, about: Mapping[str, Any]) -> Path:
    """Where the record goes: below ``output``, else below benchmarks/results/GPU."""
    gpu = gpu_folder(about)
    return (output or Path("benchmarks") / "results" / gpu) / f"sm80-on-{gpu.removeprefix('nvidia-')}"


def main(run: Run) -> int:
    """Measure all tiles; 1 if a result of ours is wrong, or a kernel cannot run.

    Raises:
        ValueError: not on a GPU, a size without K, a pattern that matches nothing.
    """
    if run.device.type != "cuda":
        raise ValueError("--mma: needs a GPU")
    bench = run.bench(of=MmaBench, pause_s=None)  # whose buffers make the device ready
    at_once, failed = occupancy(run)
    if not at_once:
        show([], [f"FAILED: {name}: {why}" for name, why in failed.items()])
        return 1
    return measure(run, bench, at_once, failed)


def measure(
    run: Run, bench: Bench, at_once: Mapping[tuple[Setting, Tile], int], failed: Mapping[str, str]
) -> int:
    """`main`, with what `occupancy` found."""
    options = run.options
    cases, left_out = every_case(run.shapes(), at_once)
    chosen = set(matching([case.name for case in cases], options.cases, "with --mma"))
    loop = Loop(run.device)
    beside = {
        case.name: Beside(
            case.waves,
            loop.flops(work(case), case.setting.arithmetic == "tf32"),
            products(case.setting),
        )
        for case in cases
    }
    about = {
        "ctas_at_once": {f"{setting} {tile.text}": count for (setting, tile), count in at_once.items()},
        "left_out": left_out,
        "failed": failed,
    }

    def figures(results: Sequence[CaseResult]) -> dict[str, Any]:
        return about | mma_points.figures(results, beside)

    effort, where = dataclasses.asdict(bench.effort), folder(options.output, run.about)
    record = run.record(KIND, mma_points.METHOD, effort, where)
    available, record.absent = run.baselines(every_baseline(loop, options.cutlass))
    cases = [case for case in cases if case.name in chosen]
    wrong = run.measure(record, bench, cases, available, figures, may_stop=True)
    summary = record.summary()
    remarks = [*failures(record), *(f"FAILED: {name}: {why}" for name, why in failed.items())]
    remarks += [f"left out: {name}: {why}" for name, why in left_out.items()]
    record.finish(mma_points.tables(summary), [*remarks, *(f"missed: {line}" for line in summary["missed"])])
    return bool(wrong or failed)
