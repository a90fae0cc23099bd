"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import DTYPES, PRECISIONS
from benchmarks.harness import environment
from benchmarks.harness.report import Console
from benchmarks.kinds import CPU_TIME_BUDGET_S, MODELS_TIME_BUDGET_S, Run

USAGE = 2
COUNT = 200
_EPILOG = """\
examples:
  python -m benchmarks --output bench                     the five models at their real sizes, all baselines
  python -m benchmarks --cases linear/bias_relu --dtypes bf16 --sizes 1024x8192x8192 4096x4096x4096
  python -m benchmarks --custom --no-max-autotune --output custom     any epilogue from one Python function
  python -m benchmarks --random 1 --count 200 --between   random shapes, each case held to its bar at every point
  python -m benchmarks --host --output host               what a call costs the host, from Python to the launch
  python -m benchmarks --models --output models           whole models, as they are, fused and compiled
  python -m benchmarks --tune --random 7 --count 20 --output tune     what epigemm.tune gains
  python -m benchmarks --plans --random 1 --count 1000 --output DIR   every plan, to fit the cost models to
  python -m benchmarks.gradings --output gradings         accuracy of fp32
exit status: 0 fine, 1 one of our results is wrong or missing, 2 wrong usage
"""
# By kind: the options of others that it goes without. The first that is given is the kind.
_WHAT = ("dtypes", "precision", "peers", "exclude", "no_max_autotune", "rounds")
_ELSEWHERE = {
    "custom": ("random", "precision", "plans", "host", "models", "tune"),
    "host": ("random", "plans", "models", "tune", *_WHAT),
    "models": ("sizes", "random", "plans", "tune", *_WHAT),
    "tune": ("sizes", "plans", "quick", "cases", *_WHAT),
    "plans": ("quick", "peers", "exclude", "no_max_autotune"),
    "random": ("sizes", "quick", "dtypes", "precision"),
    "": (),
}


def kind_of(options: argparse.Namespace) -> str:
    """Which record is asked for, "" for the five models.

    Raises:
        ValueError: options that do not go together.
    """

    def given(name: str) -> bool:
        return getattr(options, name) not in (None, False, [])

    kind = next(kind for kind in _ELSEWHERE if not kind or given(kind))
    if others := [name for name in _ELSEWHERE[kind] if given(name)]:
        raise ValueError(f"--{kind}: goes without --{others[0].replace('_', '-')}")
    if options.layers and (options.sizes or kind != "custom"):
        raise ValueError("--layers: goes with --custom, and without --sizes")
    if options.random is None and (options.between or options.count is not None):
        raise ValueError("--count, --between: go with --random SEED, which their points follow from")
    if kind == "tune" and options.random is None:
        raise ValueError("--tune: goes with --random SEED")
    if options.count is None:
        options.count = COUNT
    if options.count < 0 or not (options.count or options.between):
        raise ValueError(f"--count: expected at least 1, or 0 with --between, got {options.count}")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"--rounds: expected at least 1, got {options.rounds}")
    return kind


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Check and time the fused ops against what PyTorch users have today.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = p.add_argument_group("which record (without one of these: the five models)")
    seed = (
        "cases at random shapes that follow from SEED alone; the record goes to random-SEED in --output, or "
    )
    seed += "in benchmarks/results/GPU"
    between = "with --random: besides, M between powers of two on four layers, 72 points"
    kinds.add_argument("--custom", action="store_true", help="epilogues made of one Python function")
    kinds.add_argument("--layers", action="store_true", help="with --custom: layers with a short K")
    kinds.add_argument("--random", type=int, metavar="SEED", help=seed)
    kinds.add_argument("--count", type=int, metavar="N", help=f"how many random shapes ({COUNT})")
    kinds.add_argument("--between", action="store_true", help=between)
    kinds.add_argument("--host", action="store_true", help="what a call costs the host")
    kinds.add_argument("--models", action="store_true", help="whole models; --cases: NETWORK/MODE")
    kinds.add_argument("--plans", action="store_true", help="every plan, at --random or --sizes, unchecked")
    kinds.add_argument("--tune", action="store_true", help="what epigemm.tune gains, at --random")
    what = p.add_argument_group("what to compute")
    cases = "names, parts of names, patterns, or 2/76"
    sizes = "in place of the models' (elementwise: MxN)"
    precision = "for fp32; GPU: both, CPU: highest"
    what.add_argument("--cases", nargs="+", default=[], metavar="NAME", help=cases)
    what.add_argument("--sizes", nargs="+", default=[], metavar="MxNxK", help=sizes)
    what.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="default: fp32 bf16")
    what.add_argument("--precision", nargs="+", choices=list(PRECISIONS), help=precision)
    what.add_argument("--device", default="", help="cuda (default where there is one), cuda:1, cpu")
    who = p.add_argument_group("against what")
    autotune = "leave out torch.compile's, which takes longest"
    who.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="these alone, beside epigemm")
    who.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="leave these out")
    who.add_argument("--no-max-autotune", action="store_true", help=autotune)
    how = p.add_argument_group("how long")
    quick = "few rounds, nothing measured alone; --models: batches of 2, and no Inductor"
    budget = (
        "start no slow baseline, and with --random, --plans, --models or --custom no point, after so many "
    )
    budget += f"seconds (CPU: {CPU_TIME_BUDGET_S:g}; --models: {MODELS_TIME_BUDGET_S:g})"
    how.add_argument("--rounds", type=int, help="calls in turn of each alternative, at least (15)")
    how.add_argument("--quick", action="store_true", help=quick)
    how.add_argument("--time-budget", type=float, metavar="S", help=budget)
    out = p.add_argument_group("what to keep")
    trees = "git trees of the source, where git is missing"
    output = "summary.json, record.json, tables.md and plots"
    out.add_argument("--output", type=Path, metavar="DIR", help=output)
    out.add_argument("--trees", metavar="csrc=HASH,python=HASH", help=trees)
    return p


def _device(name: str) -> torch.device:
    """The device asked for, else a GPU where there is one.

    Raises:
        ValueError: neither a CPU nor a GPU that torch sees.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device: expected cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device: got {name!r}, but torch sees {count} GPUs")
        torch.cuda.set_device(device.index or 0)
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        kind, device = kind_of(options), _device(options.device)
        run = Run(console, options, device, kind, environment.describe(device, options.trees))
        return int(importlib.import_module(f"benchmarks.kinds.{kind or 'bench'}").main(run))
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE
