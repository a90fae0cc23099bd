"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import DTYPES
from benchmarks.harness import environment
from benchmarks.kinds import CPU_TIME_BUDGET_S, Run
from benchmarks.models.jobs import VARIANTS

USAGE = 2
_EPILOG = """\
examples:
  python -m benchmarks --output bench                     the five models at their real sizes
  python -m benchmarks --cases linear/bias_relu --dtypes bf16 --sizes 1024x8192x8192 4096x4096x4096
  python -m benchmarks --cases 'custom/*' 'glu/*'         any epilogue from one Python function; gated pairs of products
  python -m benchmarks --random 1 --count 200 --between   random shapes, against the ratio wanted of each case
  python -m benchmarks --random 1 --short --count 200     layers with a short K, against the time of torch.mm
  python -m benchmarks --random 1 --short --peers mm eager quack      beside another library; the folder is quack
  python -m benchmarks --host --output host               what a call costs the host, from Python to the launch
  python -m benchmarks --models --output models           whole models: plain, fused and compiled
  python -m benchmarks --models --cases '*/inference/*' --variants whole overhead --shard 1/2 --output models-1
  python -m benchmarks --kernelbench PATH --cases 'level2/*' --output kernelbench   the public suite
  python -m benchmarks --contest experts --random 1 --count 30 --output experts      also fp8
  python -m benchmarks --plans --random 1 --count 1000 --output DIR   all plans, to fit the cost models
  python -m benchmarks.gradings --output gradings         accuracy of fp32
exit status: 0 fine, 1 one of our results is wrong or missing, 2 wrong usage
"""
# By kind: the options that it takes; of several kinds on one command line the first counts, and takes the others.
_TAKES = {
    "host": "cases sizes quick",
    "models": "cases quick time_budget variants shard list",
    "kernelbench": "cases quick time_budget shard list",
    "contest": "random count cases quick time_budget",
    "plans": "random count between cases sizes dtypes time_budget",
    "random": "short count between cases peers time_budget",
    "bench": "cases sizes dtypes peers quick time_budget",
}
_ALWAYS = ("device", "output", "trees")


def kind_of(options: argparse.Namespace) -> str:
    """Which record is asked for.

    Raises:
        ValueError: options that do not go together.
    """
    given = {name: value for name, value in vars(options).items() if value != parser().get_default(name)}
    kind = next((kind for kind in _TAKES if kind in given), "bench")
    if "short" in given and kind != "random":
        raise ValueError("--short: goes with --random SEED alone")
    for name in given:
        if name not in (kind, *_ALWAYS, *_TAKES[kind].split()):
            what = f"--{kind}" if kind in given else "the five models"
            raise ValueError(f"{what}: goes without --{name.replace('_', '-')}")
    if options.short and options.between:
        raise ValueError("--short: goes without --between")
    if options.count < 0 or not (options.count or options.between or options.short):
        raise ValueError(f"--count: expected at least 1, or 0 with --between or --short, got {options.count}")
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
    seed = "random shapes, which depend on SEED alone; the record goes to random-SEED in --output, or in "
    seed += "benchmarks/results/GPU"
    between = "also 72 points with M between powers of two, on four layers"
    short = "with --random: twenty layers of models and random ones with a short K, in 16 bits, against torch.mm; the "
    short += "folder is short-SEED"
    models = "whole models; --cases takes NETWORK/PRECISION/MODE/BATCH, parts of it, or patterns"
    suite = "the problems of a checkout of KernelBench, levels 1 to 3; --cases takes level2/* and the like"
    kinds.add_argument("--random", type=int, metavar="SEED", help=seed)
    kinds.add_argument(
        "--count", type=int, default=200, metavar="N", help="number of random shapes (default: 200)"
    )
    kinds.add_argument("--between", action="store_true", help=between)
    kinds.add_argument("--short", action="store_true", help=short)
    contests = "8-bit products, or experts, against PyTorch's; --random SEED --count N: random ones, too"
    kinds.add_argument("--contest", choices=("fp8", "experts"), help=contests)
    kinds.add_argument("--host", action="store_true", help="what a call costs the host")
    kinds.add_argument("--models", action="store_true", help=models)
    kinds.add_argument("--kernelbench", type=Path, metavar="PATH", help=suite)
    kinds.add_argument(
        "--plans",
        action="store_true",
        help="time all plans, at the shapes of --random or --sizes; no result is checked",
    )
    what = p.add_argument_group("what to compute")
    cases = "names, parts of names, patterns, or numbers of KernelBench, as 2/76 (default: all; of the problems those "
    cases += "of the five models, not custom/* and glu/*)"
    sizes = "in place of the cases' own sizes (elementwise cases: MxN; glu/*: Mx2NxK)"
    what.add_argument("--cases", nargs="+", default=[], metavar="NAME", help=cases)
    what.add_argument("--sizes", nargs="+", default=[], metavar="MxNxK", help=sizes)
    what.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"], help="default: fp32 bf16"
    )
    what.add_argument("--device", default="", help="cuda (default where there is one), cuda:1, cpu")
    variants = (
        "with --models: eager_options (fuse without a compiler, against eager), backend (against compile), "
    )
    variants += "whole (fuse against eager), overhead (as backend, with mode='reduce-overhead'); default: the first two"
    what.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[], help=variants)
    shard = "with --models, --kernelbench: the I-th of N parts of the jobs; tools/merge_records.py merges their records"
    what.add_argument("--shard", default="1/1", metavar="I/N", help=shard)
    what.add_argument("--list", action="store_true", help="with them: print the jobs, and measure none")
    who = p.add_argument_group("against what")
    peers = "compare with these baselines only; max_autotune, quack and (with --random) cutlass, which are slow to "
    peers += "prepare, take part only so"
    who.add_argument("--peers", nargs="+", default=[], metavar="NAME", help=peers)
    how = p.add_argument_group("how long")
    quick = "few rounds; with --models (batches of 2) and --kernelbench without Inductor"
    budget = "after so many seconds start no slow baseline, and with other kinds no other point "
    budget += f"(default: on a CPU {CPU_TIME_BUDGET_S:g}; with --models, --kernelbench 540)"
    how.add_argument("--quick", action="store_true", help=quick)
    how.add_argument("--time-budget", type=float, metavar="S", help=budget)
    keep = p.add_argument_group("what to keep")
    add_output(keep, "the folder for summary.json, record.json, tables.md and plots")
    return p


def add_output(group: argparse._ArgumentGroup, what: str) -> None:
    """The options that say where a record goes, and of which source it is."""
    trees = "git tree hashes of the source, for a machine without git"
    group.add_argument("--output", type=Path, metavar="DIR", help=what)
    group.add_argument("--trees", metavar="csrc=HASH,python=HASH", help=trees)


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
    try:
        kind, device = kind_of(options), _device(options.device)
        run = Run(options, device, environment.describe(device, options.trees))
        return int(importlib.import_module(f"benchmarks.kinds.{kind}").main(run))
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE
