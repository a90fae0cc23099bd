"""What `epigemm.tune` does to calls at random shapes: their time before and after, and the seconds that it took.

    python -m tools.measure_tune --seed 1 --count 20 --output DIR

Each call is timed with the cost models' plan and with the tuned one, by turns, four times each; device time, L2
flushed, the host hidden. A ratio above 1 means that tuning made the call faster. Writes DIR/tune.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epigemm
from benchmarks import environment
from benchmarks.drawn.points import draw as draw_shapes
from epigemm import tables
from epigemm._native import ops
from epigemm.timing import Effort, Timer, make_timer

_EFFORT = Effort(rounds=11, min_ms=0.0, max_rounds=11)
_TURNS = 4
_KINDS = (
    ("linear_relu", "bfloat16"),
    ("linear_sigmoid_scale_residual", "bfloat16"),
    ("linear_relu", "float32"),
)


def _call(kind: tuple[str, str], m: int, n: int, k: int) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    name, dtype = kind
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, dtype))

    scale: tuple[float, ...] = (2.0,) if "scale" in name else ()
    return getattr(epigemm, name), (draw(m, k), draw(n, k) / k**0.5, draw(n), *scale)


def _median_us(timer: Timer, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> float:
    function(*arguments)
    host_us = timer.warm_up(lambda: function(*arguments))
    return 1e3 * statistics.median(timer.in_turn([lambda: function(*arguments)], _EFFORT, host_us)[0])


def measure(kind: tuple[str, str], m: int, n: int, k: int, timer: Timer) -> dict[str, Any]:
    """One call before and after `tune`."""
    function, arguments = _call(kind, m, n, k)
    function(*arguments)
    torch.cuda.synchronize()
    started = time.monotonic()
    found = epigemm.tune(function, *arguments)
    seconds = time.monotonic() - started
    before, after = [], []
    for _ in range(_TURNS):
        ops._clear_measured(0)
        before.append(_median_us(timer, function, arguments))
        tables.install(0, found.entries)
        after.append(_median_us(timer, function, arguments))
    times = {"before_us": statistics.median(before), "after_us": statistics.median(after)}
    chosen = [dataclasses.asdict(each) for each in found.candidates if each.chosen]
    return {
        "call": f"{kind[0]} {kind[1]} {m}x{n}x{k}",
        **times,
        "ratio": times["before_us"] / times["after_us"],
        "tune_seconds": seconds,
        "candidates": len(found.candidates),
        "chosen": chosen,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a call, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the shapes (default 1)")
    parser.add_argument("--count", type=int, default=20, help="calls (default 20)")
    parser.add_argument("--output", type=Path, required=True, help="the folder of tune.json")
    parser.add_argument(
        "--trees", help="csrc=HASH,python=HASH: git trees of the source, where git is missing"
    )
    options = parser.parse_args(arguments)
    # What is measured here is not left to later processes of this user.
    os.environ["EPIGEMM_CACHE_DIR"] = tempfile.mkdtemp(prefix="epigemm-tune-")
    timer, calls = make_timer(torch.device("cuda", 0)), []
    with torch.no_grad():
        for index, shape in enumerate(draw_shapes(options.seed, options.count)):
            assert shape.k is not None
            calls.append(measure(_KINDS[index % len(_KINDS)], shape.m, shape.n, shape.k, timer))
            print(
                "{call}: {before_us:.1f} -> {after_us:.1f} us, {ratio:.3f}; {tune_seconds:.2f} s".format(
                    **calls[-1]
                )
            )
    ratios = [call["ratio"] for call in calls]
    summary = {
        "geomean": math.exp(statistics.fmean(map(math.log, ratios))),
        "worst": min(ratios),
        "most_seconds": max(call["tune_seconds"] for call in calls),
    }
    print(json.dumps(summary))
    about = environment.describe(torch.device("cuda", 0), options.trees)
    about["command"][1:3] = ["-m", "tools.measure_tune"]
    options.output.mkdir(parents=True, exist_ok=True)
    record = {"environment": about, "seed": options.seed, "summary": summary, "calls": calls}
    (options.output / "tune.json").write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
