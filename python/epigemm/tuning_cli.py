"""The command that measures calls before they come up, for the cache: `python -m epigemm.tune`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from epigemm import packs, plans, tables
from epigemm._native import registry
from epigemm.calls import LinearCall
from epigemm.candidates import Kind
from epigemm.epilogues import EPILOGUES, Epilogue
from epigemm.kernels import why_none
from epigemm.precision import DEFAULT
from epigemm.tuning import Tuning, entry_for, measure

_Value = TypeVar("_Value")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WEIGHTS = "8192x8192,4096x4096,11008x4096,4096x11008,28672x8192,8192x28672,1024x1024,2048x2048"
ROWS = "1,16,64,256,1024,4096"


class Setup(NamedTuple):
    """One call of the grid, but for M."""

    epilogue: Epilogue  # what follows the product
    dtype: torch.dtype  # of x and the weight
    n: int  # rows of the weight
    k: int  # columns of it
    setting: str  # torch's fp32 setting: "ieee" or "tf32"
    pack_use: str  # for fp32: with the weight's pack kept, or without


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 where the file was written."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda", options.device)
    why_not = "torch sees no CUDA device" if not torch.cuda.is_available() else ""
    why_not = why_not or why_none(torch.empty(0, device=device)) or plans.no_gemm_kernels()
    if why_not:
        print(f"nothing to measure: {why_not}")
        return 1
    gpu = torch.cuda.get_device_name(device)
    output: Path = options.output or tables.cache_path(gpu)
    try:
        known = tables.read(output, gpu)
    except OSError as error:
        print(f"{output} cannot be read: {error}")
        return 1
    except ValueError as error:
        print(f"{output} is begun anew: {error}")
        known = {}
    until = time.monotonic() + options.time_budget
    finished = True
    fresh: tables.Entries = {}
    try:
        for setup in setups(options):
            for m in options.rows:
                if time.monotonic() > until:
                    finished = False
                    break
                fresh |= _measure(setup, m, device, fresh if options.again else {**known, **fresh})
    finally:
        if fresh:
            tables.merge(output, gpu, fresh.values())  # other processes may have added theirs meanwhile
        late = "" if finished else ": the time was up before the end"
        print(f"{len(fresh)} new choices in {output}, {len(known)} were there{late}")
    return 0


def setups(options: argparse.Namespace) -> Iterator[Setup]:
    """Every call of the grid but for M, the first weights in all ways before the next ones."""
    for n, k in options.weights:
        for dtype in options.dtypes:
            for epilogue in options.epilogues:
                if dtype != torch.float32:
                    yield Setup(epilogue, dtype, n, k, "ieee", packs.NONE)
                    continue
                for setting in options.settings:
                    for pack_use in (packs.KEEP, packs.NONE):
                        yield Setup(epilogue, dtype, n, k, setting, pack_use)


def make_call(setup: Setup, m: int, device: torch.device) -> LinearCall:
    """A call of this setup, on random tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=setup.dtype)

    inputs = setup.epilogue.sample_inputs(setup.n, setup.dtype, device)
    return LinearCall(
        setup.epilogue,
        draw(m, setup.k),
        draw(setup.n, setup.k) / setup.k**0.5,
        inputs.bias,
        inputs.operands,
        inputs.scalars,
        DEFAULT,
        setup.pack_use,
    )


def _measure(setup: Setup, m: int, device: torch.device, known: tables.Entries) -> tables.Entries:
    """What is not known yet, measured."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setup.setting
    try:
        call = make_call(setup, m, device)

        def is_unknown(kind: Kind) -> bool:
            return entry_for(call, kind).key not in known

        found = measure(call, is_unknown)
    except torch.OutOfMemoryError as error:
        print(f"{setup.epilogue.name}, M = {m}, N = {setup.n}, K = {setup.k}: {str(error).splitlines()[0]}")
        return {}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    _show(found)
    return {entry.key: entry for entry in found.entries}


def _show(found: Tuning) -> None:
    for entry in found.entries:
        faster = "fused" if entry.fused_us <= entry.torch_us else "torch"
        print(
            f"{found.problem.partition(', on ')[0]}: {entry.arithmetic}{' packed' if entry.packed else ''}: plan "
            f"{list(entry.plan)} {entry.fused_us:.1f} us, torch {entry.torch_us:.1f} us: {faster}",
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epigemm.tune",
        description="Measure every way to run a grid of calls on this GPU, and write the best into the cache.",
    )
    parser.add_argument("--rows", type=_rows, default=_rows(ROWS), help=f"values of M (default {ROWS})")
    parser.add_argument(
        "--weights", type=_weights, default=_weights(WEIGHTS), help=f"NxK,NxK,... (default {WEIGHTS})"
    )
    every = list(DTYPES.values())
    parser.add_argument(
        "--dtypes", type=_some_of(DTYPES), default=every, help="of bf16,fp16,fp32 (default: all)"
    )
    linear = {each["name"]: EPILOGUES[each["name"]] for each in registry() if each["linear"]}
    named = f"of {','.join(linear)} (default: all)"
    parser.add_argument("--epilogues", type=_some_of(linear), default=list(linear.values()), help=named)
    settings = {"ieee": "ieee", "tf32": "tf32"}
    about = "torch's settings for fp32 products: of ieee,tf32 (default: both)"
    parser.add_argument("--settings", type=_some_of(settings), default=list(settings), help=about)
    parser.add_argument("--output", type=Path, help="the file (default: the cache of this user)")
    parser.add_argument(
        "--again", action="store_true", help="measure what the file holds too; its other choices stay"
    )
    parser.add_argument("--time-budget", type=float, default=float("inf"), help="seconds (default: no limit)")
    parser.add_argument("--device", type=int, default=0, help="index of the CUDA device (default 0)")
    return parser


def _rows(text: str) -> list[int]:
    rows = [int(each) for each in text.split(",") if each.isdigit()]
    if len(rows) != len(text.split(",")) or 0 in rows:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted is M,M,... with positive numbers")
    return rows


def _weights(text: str) -> list[tuple[int, int]]:
    try:
        weights = [(int(n), int(k)) for n, k in (each.split("x") for each in text.split(","))]
    except ValueError:
        weights = [(0, 0)]
    if any(n < 1 or k < 1 for n, k in weights):
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted is NxK,NxK,... with positive numbers")
    return weights


def _some_of(accepted: Mapping[str, _Value]) -> Callable[[str], list[_Value]]:
    """For an option with names of these, between commas."""

    def chosen(text: str) -> list[_Value]:
        names = text.split(",")
        if not set(names) <= set(accepted):
            raise argparse.ArgumentTypeError(f"got {text!r}; accepted are {','.join(accepted)}")
        return [accepted[name] for name in names]

    return chosen
