"""The options of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.cases import DTYPES, PRECISIONS

CPU_TIME_BUDGET_S = 40.0
"""A run on a CPU starts nothing slow after so many seconds, unless it is told otherwise."""

_EPILOG = """\
examples:
  python -m benchmarks                                  every model at its real size, all peers
  python -m benchmarks --quick --exclude max_autotune   the same, shorter
  python -m benchmarks --cases linear/bias_relu --dtypes bf16 --sizes 1024x8192x8192 4096x4096x4096
  python -m benchmarks --cases bias_relu --dtypes bf16 --sweep-m 16:16384 --output results
  python -m benchmarks --fp32 --output results          fp32: every layer, and bias + ReLU from 16 rows to 16384
  python -m benchmarks --grid --time-budget 300 --output sweep   M = 1 to 65536 on seven layers, the best peer named
  python -m benchmarks --grid --peers eager mm addmm_activation --output sweep   the same without what tunes for long
  python -m benchmarks --plans --dtypes bf16            every plan of the fused kernel against torch.mm
  python -m benchmarks --plans --grid --time-budget 300 --output plans   the same at every point of the grid
  python -m benchmarks --random 1 --count 200 --between      random shapes, each case held to its bar at every point
  python -m benchmarks --random 1 --count 2000 --plans --unchecked --peers mm   every plan at random shapes
  python -m benchmarks --host --output host             what a call costs the host, from Python to the launch
  python -m benchmarks --models --output results        whole models, as they are, fused and compiled
  python -m benchmarks --custom --no-max-autotune --output custom   any epilogue from one Python function
  python -m benchmarks --render results/bench.json --plots results
exit status: 0 fine, 1 one of our results is wrong or missing, 2 wrong usage
"""


def parse_sweep(texts: Sequence[str]) -> list[int]:
    """Values of M: ``["16", "64,256"]``, or a range that doubles: ``["16:16384"]``.

    Raises:
        ValueError: not positive integers, or a range that runs backwards.
    """
    values: list[int] = []
    for part in ",".join(texts).split(","):
        low, colon, high = part.strip().partition(":")
        if not low.isdigit() or int(low) < 1 or (colon and (not high.isdigit() or int(high) < int(low))):
            raise ValueError(f"--sweep-m: expected M, M,M,... or LOW:HIGH (doubling), got {part!r}")
        m = int(low)
        while m <= int(high or low):
            values.append(m)
            m *= 2
    return sorted(set(values))


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Check and time the fused ops against what PyTorch users have today.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = p.add_argument_group("what to compute")
    what.add_argument(
        "--cases", nargs="+", default=[], metavar="NAME", help="names, parts of names, patterns, or 2/76"
    )
    what.add_argument(
        "--sizes", nargs="+", default=[], metavar="MxNxK", help="in place of the models' (elementwise: MxN)"
    )
    what.add_argument(
        "--sweep-m", nargs="+", default=[], metavar="M", help="replace M: 16 64,256 or 16:16384 (doubling)"
    )
    what.add_argument(
        "--fp32", action="store_true", help="fp32's own selection: every layer, and bias + ReLU at more sizes"
    )
    what.add_argument(
        "--grid",
        action="store_true",
        help="M = 1 to 65536 (or --sweep-m) on seven layers (or the N, K of --sizes), of linear/bias_relu: a "
        "sweep over powers of two, at which choices used to be tuned: not a test of the choice",
    )
    what.add_argument(
        "--random",
        type=int,
        metavar="SEED",
        help="a test of the choice: a fixed list of cases (--cases chooses) at random shapes that follow from SEED "
        "alone; --output defaults to benchmarks/results/GPU, the records go to random-SEED in it",
    )
    what.add_argument("--count", type=int, metavar="N", help="how many random shapes (200)")
    what.add_argument(
        "--between",
        action="store_true",
        help="with --random: besides, M between powers of two on four layers, 72 points",
    )
    what.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), help="default: fp32 bf16; with --grid: bf16 fp16 fp32"
    )
    what.add_argument(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        help="for fp32; GPU: both, CPU: highest; with --grid: high",
    )
    what.add_argument("--device", default="", help="cuda (default where there is one), cuda:1, cpu")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--list", action="store_true", help="list cases and peers, run nothing")
    what.add_argument("--plans", action="store_true", help="sweep every plan of the fused kernel instead")
    what.add_argument(
        "--all-plans",
        action="store_true",
        help="with --plans: print all of them; with --grid or --random too: every order",
    )
    what.add_argument(
        "--unchecked",
        action="store_true",
        help="with --plans and --grid or --random: hold no result against float64, for a fit of costs at many points",
    )
    what.add_argument(
        "--host", action="store_true", help="the host's time of small calls instead; --cases chooses them"
    )
    what.add_argument(
        "--models",
        action="store_true",
        help="whole models instead, fused and not; --cases chooses them, --sweep-m their batches",
    )
    what.add_argument(
        "--custom",
        action="store_true",
        help="epilogues made of one Python function instead; --cases, --sizes and --dtypes choose",
    )
    what.add_argument(
        "--layers",
        action="store_true",
        help="with --custom: layers of transformers and recommenders with a short K instead of the usual sizes",
    )
    who = p.add_argument_group("against what")
    who.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="these alone, beside epigemm")
    who.add_argument("--no-peers", action="store_true", help="epigemm alone")
    who.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="leave these out")
    who.add_argument(
        "--no-max-autotune", action="store_true", help="leave out torch.compile's, which takes longest"
    )
    how = p.add_argument_group("how long")
    how.add_argument("--rounds", type=int, help="calls in turn of each alternative, at least (15)")
    how.add_argument("--quick", action="store_true", help="few rounds, nothing measured alone")
    how.add_argument(
        "--time-budget",
        type=float,
        metavar="S",
        help=f"start no slow peer, and with --grid, --random, --models or --custom no point, after so many "
        f"seconds (CPU: {CPU_TIME_BUDGET_S:g}; --models: {models.TIME_BUDGET_S['cuda']:g}, "
        f"CPU {models.TIME_BUDGET_S['cpu']:g})",
    )
    out = p.add_argument_group("what to keep")
    out.add_argument("--json", type=Path, metavar="FILE", help="the record; rewritten after every case")
    out.add_argument("--csv", type=Path, metavar="FILE", help="one line per measurement")
    out.add_argument("--plots", type=Path, metavar="DIR", help="PNG files")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="tables for people")
    out.add_argument(
        "--output", type=Path, metavar="DIR", help="bench.json, bench.csv, bench.md and plots in one folder"
    )
    out.add_argument(
        "--trees", metavar="csrc=HASH,python=HASH", help="git trees of the source, where git is missing"
    )
    out.add_argument(
        "--render",
        type=Path,
        metavar="JSON",
        help="run nothing: CSV, tables and plots from an earlier record",
    )
    return p
