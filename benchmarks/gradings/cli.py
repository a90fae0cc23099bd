"""The command ``python -m benchmarks.gradings``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gradings import bounds, cost, products, show, sweep
from benchmarks.gradings.data import BY_NAME, DataClass
from benchmarks.gradings.exact import GRADERS, Verdict
from benchmarks.gradings.products import SCALED, SPLIT, Product
from benchmarks.gradings.special import K as SPECIAL_K
from benchmarks.gradings.special import special_verdicts
from benchmarks.harness import environment, report
from epigemm._native import cuda_status

SCHEMA = 1
METHOD = (
    "Errors of x @ weight.T against float64, as multiples of eps |A||B| entry by entry, eps = 2^-24: the largest over "
    "all entries and seeds, and the root mean square. Checks have a right answer or a derived bound."
)
OK, WRONG, USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.gradings",
        description="Grade the accuracy of the fp32 products beside SGEMM and TF32, against float64.",
        epilog="exit status: 0 fine, 1 one of our checks failed, 2 wrong usage or no GPU that the kernels run on",
    )
    p.add_argument("--output", type=Path, metavar="DIR", help="gradings.json and plots")
    p.add_argument("--data", nargs="+", default=[], metavar="NAME", help="these classes of inputs alone")
    p.add_argument("--max-k", type=int, default=max(sweep.KS), metavar="K", help="no K above it")
    p.add_argument(
        "--trees", metavar="csrc=HASH,python=HASH", help="git trees of the source, where git is missing"
    )
    return p


def verdicts(graded: Mapping[str, Product], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Every check of every product; a low precision is held to its own bound where a bound is asked for."""
    return {name: [v.record() for v in _verdicts(name, product, device)] for name, product in graded.items()}


def _verdicts(name: str, product: Product, device: torch.device) -> Iterator[Verdict]:
    low = SCALED in name or products.PRECISION[SCALED] in name
    for grader, function in GRADERS.items():
        if not (low and grader == "representation"):
            yield from function(product, device)
    if low:
        beside = None if name == SCALED else products.tf32
        yield from special_verdicts(product, device, max(bounds.scaled(SPECIAL_K), 2.0**-8), beside)
    else:
        yield from special_verdicts(product, device)


def grade(
    graded: Mapping[str, Product],
    checked: Mapping[str, Product],
    device: torch.device,
    *,
    classes: Sequence[DataClass] = tuple(BY_NAME.values()),
    ks: Sequence[int] = sweep.KS,
    size: tuple[int, int] = (sweep.ROWS, sweep.COLUMNS),
    few_rows: bool = False,
) -> dict[str, Any]:
    """Sweep, thresholds and verdicts as plain data; `few_rows`: also small M, which takes a GPU."""
    started = time.monotonic()

    def progress(what: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {what}", file=sys.stderr, flush=True)

    points = sweep.run(graded, device, classes=classes, ks=ks, size=size, progress=progress)
    return {
        "size": size,
        "sweep": [point.record() for point in points],
        "few_rows": [point.record() for point in sweep.run_few_rows(device, classes)] if few_rows else [],
        "limits": {name: {"max": limits[0], "rms": limits[1]} for name, limits in sweep.LIMITS.items()},
        "thresholds": {name: sweep.thresholds(points, name) for name in (SPLIT, SCALED)},
        "verdicts": verdicts(checked, device),
    }


def _record(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    about = environment.describe(device, options.trees)
    about["command"][2] = "benchmarks.gradings"
    unknown = sorted(set(options.data) - set(BY_NAME))
    if unknown:
        raise ValueError(f"--data: got {', '.join(unknown)}; accepted are {', '.join(BY_NAME)}")
    classes = [data for name, data in BY_NAME.items() if not options.data or name in options.data]
    ks = [k for k in sweep.KS if k <= options.max_k]
    if not ks:
        raise ValueError(f"--max-k: got {options.max_k}; accepted is at least 1")
    graded = products.on_gpu()
    checked = {name: graded[name] for name in (products.SGEMM, SPLIT, SCALED)}
    checked |= {
        f"public {precision}": products.public(precision) for precision in products.PRECISION.values()
    }
    found = grade(graded, checked, device, classes=classes, ks=ks, few_rows=True)
    return {"schema": SCHEMA, "environment": about, "guard": cost.measure(device)} | found


def failed(record: Mapping[str, Any]) -> bool:
    """Whether a check of ours failed; SGEMM's own failures are only shown."""
    ours = {name: found for name, found in record["verdicts"].items() if name != products.SGEMM}
    return any(not verdict["ok"] for found in ours.values() for verdict in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gradings; returns the exit status."""
    options = parser().parse_args(arguments)
    console = report.Console()
    try:
        reason = "torch sees no CUDA device" if not torch.cuda.is_available() else cuda_status(0)
        if reason:
            raise ValueError(f"gradings need a GPU that the kernels run on: {reason}")
        record = _record(options, torch.device("cuda", torch.cuda.current_device()))
    except (ValueError, OSError) as error:
        print(f"benchmarks.gradings: {error}", file=sys.stderr)
        return USAGE
    return finish(record, console, options.output)


def finish(record: Mapping[str, Any], console: report.Console, folder: Path | None) -> int:
    """Show and write a record; the exit status."""
    record = json.loads(json.dumps(report.finite(record), allow_nan=False))
    console.line(environment.headline(record["environment"]))
    about, figures = record["environment"], show.figures(record)
    summary = report.Record("gradings", about, METHOD, {}, {}, [], figures, complete=True)
    if folder:
        for path in (report.write_json(record, folder / "gradings.json"), *show.write_plots(record, folder)):
            console.line(f"wrote {path}")
    summary.finish(console, folder, show.tables(record), show.remarks(record))
    return WRONG if failed(record) else OK
