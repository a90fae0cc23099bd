"""The command ``python -m benchmarks.gradings``: all products graded on a GPU, the record and its tables.

What has one right answer (integers, special values, Demmel's tests) the test suite checks in every kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cli import USAGE, add_output
from benchmarks.gradings import products, sweep
from benchmarks.gradings.data import BY_NAME, DataClass
from benchmarks.gradings.products import BASELINE, SCALED, SGEMM, SPLIT, Product
from benchmarks.harness import environment
from benchmarks.harness.report import Record, Table, finite, progress, write_json
from epigemm._native import cuda_status

METHOD = (
    "Errors of x @ weight.T against float64, as multiples of eps |A||B| entry by entry, eps = 2^-24: the largest over "
    "all entries and seeds, and the root mean square."
)
LEAST_K = 128
"""From this K on the planner may choose fp16x3 (csrc/gemm/fp16_slices/coverage.cpp)."""
_SHOWN_K = (16, 64, 256, 1024, 4096, 8192, 32768)


def grade(
    graded: Mapping[str, Product],
    device: torch.device,
    *,
    classes: Sequence[DataClass] = tuple(BY_NAME.values()),
    ks: Sequence[int] = sweep.KS,
    size: tuple[int, int] = (sweep.ROWS, sweep.COLUMNS),
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Sweep and thresholds as plain data."""
    points: list[sweep.Point] = []
    for data in classes:
        points += [sweep.grade(graded, data, k, sweep.seeds_for(k), device, size) for k in ks]
        told(data.title)
    return {
        "size": size,
        "sweep": [asdict(point) for point in points],
        "limits": {name: {"max": limits[0], "rms": limits[1]} for name, limits in sweep.LIMITS.items()},
        "thresholds": {name: sweep.thresholds(points, name) for name in (SPLIT, SCALED)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 fp16x3 is less accurate than promised, 2 wrong usage or no GPU that the kernels run on."""
    what = "Grade the accuracy of the fp32 products beside SGEMM and TF32, against float64."
    p = argparse.ArgumentParser(prog="python -m benchmarks.gradings", description=what, epilog=main.__doc__)
    add_output(
        p.add_argument_group("what to keep"), "the folder for summary.json, gradings.json and tables.md"
    )
    options = p.parse_args(arguments)
    try:
        reason = "torch sees no CUDA device" if not torch.cuda.is_available() else cuda_status(0)
        if reason:
            raise ValueError(f"gradings need a GPU that the kernels run on: {reason}")
        device = torch.device("cuda", torch.cuda.current_device())
        about = environment.describe(device, options.trees)
        about["command"][2] = "benchmarks.gradings"
        found = grade(products.on_gpu(), device, told=progress(len(BY_NAME)))
        found["few_rows"] = [asdict(point) for point in sweep.run_few_rows(device, list(BY_NAME.values()))]
        return finish(about, found, options.output)
    except (ValueError, OSError) as error:
        print(f"benchmarks.gradings: {error}", file=sys.stderr)
        return USAGE


def finish(about: Mapping[str, Any], found: Mapping[str, Any], folder: Path | None) -> int:
    """Show and write a record; the exit status."""
    found = json.loads(json.dumps(finite(found)))
    if folder:
        write_json({"schema": 1, "environment": about, **found}, folder / "gradings.json")
    least = found["thresholds"][SPLIT]["all"]
    is_promised = least is not None and least <= LEAST_K
    remarks = (
        [] if is_promised else [f"FAILED: fp16x3 is as accurate as SGEMM from K = {least} on, not {LEAST_K}"]
    )
    Record("gradings", about, METHOD, folder, figures=figures(found)).finish(tables(found), remarks)
    return int(not is_promised)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Errors of the sweep, thresholds."""
    names = list(found["sweep"][0]["errors"])
    rows = [
        [BY_NAME[p["data"]].title, str(p["k"]), *(_cell(p["errors"][name]) for name in names)]
        for p in found["sweep"]
        if p["k"] in _SHOWN_K
    ]
    result = [Table("Largest / rms of |error| / (eps |A||B|), eps = 2^-24", ("data", "K", *names), rows)]
    for arithmetic, by_data in found["thresholds"].items():
        rows = [[name, "never" if k is None else str(k)] for name, k in by_data.items()]
        title = f"{arithmetic}: no less accurate than {BASELINE[arithmetic]} from this K on"
        result.append(Table(title, ("data", "K"), rows))
    return result


def _cell(errors: Mapping[str, Any]) -> str:
    if errors["max_ratio"] is None or errors["not_finite"]:
        return "wrong"
    return f"{errors['max_ratio']:.3g} / {errors['rms_ratio']:.2g}"


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json holds: thresholds, and our worst error over SGEMM's at few rows, by data."""
    few: dict[str, dict[str, float]] = {}
    for point in found["few_rows"]:
        for measure, name in (("max_ratio", "max_vs_sgemm"), ("rms_ratio", "rms_vs_sgemm")):
            ours, other = (point["errors"].get(which, {}).get(measure) for which in (SPLIT, SGEMM))
            if ours and other:
                worst = few.setdefault(point["data"], {})
                worst[name] = max(worst.get(name, 0.0), ours / other)
    return {"thresholds": found["thresholds"], "cases": few}
