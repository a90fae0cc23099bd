"""The command ``python -m benchmarks.gradings``: everything graded on a GPU, its record, tables and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cli import USAGE, add_output
from benchmarks.gradings import bounds, cost, products, sweep
from benchmarks.gradings import figures as drawings
from benchmarks.gradings.data import BY_NAME, DataClass
from benchmarks.gradings.exact import GRADERS, Verdict
from benchmarks.gradings.products import BASELINE, SCALED, SGEMM, SPLIT, Product
from benchmarks.gradings.special import K as SPECIAL_K
from benchmarks.gradings.special import special_verdicts
from benchmarks.harness import environment
from benchmarks.harness.report import Record, Table, finite, number, progress, write_json
from epigemm._native import cuda_status

METHOD = (
    "Errors of x @ weight.T against float64, as multiples of eps |A||B| entry by entry, eps = 2^-24: the largest over "
    "all entries and seeds, and the root mean square. Checks have a right answer or a derived bound."
)
_SHOWN_K = (16, 64, 256, 1024, 4096, 8192, 32768)


def _verdicts(name: str, product: Product, device: torch.device) -> Iterator[Verdict]:
    """Every check of a product; a low precision is held to its own bound where a bound is asked for."""
    low = name in (SCALED, f"public {products.PRECISION[SCALED]}")
    for grader, function in GRADERS.items():
        if not (low and grader == "representation"):
            yield from function(product, device)
    if low:
        beside = None if name == SCALED else products.tf32
        yield from special_verdicts(product, device, max(bounds.scaled(SPECIAL_K), 2.0**-8), beside)
    else:
        yield from special_verdicts(product, device)


def verdicts(checked: Mapping[str, Product], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Every check of every product, as plain data."""
    return {
        name: [asdict(verdict) | {"ok": verdict.ok} for verdict in _verdicts(name, product, device)]
        for name, product in checked.items()
    }


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


def everything(device: torch.device) -> dict[str, Any]:
    """All that gradings.json holds but where it was made."""
    graded = products.on_gpu()
    checked = {name: graded[name] for name in (SGEMM, SPLIT, SCALED)}
    checked |= {f"public {wish}": products.public(wish) for wish in products.PRECISION.values()}
    found = {"guard": cost.measure(device)} | grade(graded, device, told=progress(len(BY_NAME)))
    found["few_rows"] = [asdict(point) for point in sweep.run_few_rows(device, list(BY_NAME.values()))]
    return found | {"verdicts": verdicts(checked, device)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 one of our checks failed, 2 wrong usage or no GPU that the kernels run on."""
    what = "Grade the accuracy of the fp32 products beside SGEMM and TF32, against float64."
    p = argparse.ArgumentParser(prog="python -m benchmarks.gradings", description=what, epilog=main.__doc__)
    add_output(
        p.add_argument_group("what to keep"),
        "the folder for summary.json, gradings.json, tables.md and plots",
    )
    options = p.parse_args(arguments)
    try:
        reason = "torch sees no CUDA device" if not torch.cuda.is_available() else cuda_status(0)
        if reason:
            raise ValueError(f"gradings need a GPU that the kernels run on: {reason}")
        device = torch.device("cuda", torch.cuda.current_device())
        about = environment.describe(device, options.trees)
        about["command"][2] = "benchmarks.gradings"
        return finish(about, everything(device), options.output)
    except (ValueError, OSError) as error:
        print(f"benchmarks.gradings: {error}", file=sys.stderr)
        return USAGE


def finish(about: Mapping[str, Any], found: Mapping[str, Any], folder: Path | None) -> int:
    """Show and write a record; the exit status: whether a check of ours failed. SGEMM's own are only shown."""
    found = json.loads(json.dumps(finite(found)))
    remarks = []
    for product, each in found["verdicts"].items():
        failed = [v for v in each if not v["ok"]]
        remarks.append(f"{product}: {len(each) - len(failed)} of {len(each)} checks passed")
        remarks += [f"  {v['name']}: {v['measure']}, limit {v['limit']}" for v in failed]
    if folder:
        write_json({"schema": 1, "environment": about, **found}, folder / "gradings.json")
        drawings.draw(found, about, folder)
    Record("gradings", about, METHOD, folder, figures=figures(found)).finish(tables(found), remarks)
    ours = (verdict for name, each in found["verdicts"].items() if name != SGEMM for verdict in each)
    return int(not all(verdict["ok"] for verdict in ours))


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Errors of the sweep, thresholds, what the range check costs."""
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
    rows = [
        ["x".join(map(str, g["shape"])), *(number(ms) for ms in g["ms"].values())] for g in found["guard"]
    ]
    title = "Range check: ms of a call, by what is computed again"
    return [*result, Table(title, ("M x N x K", *found["guard"][0]["ms"]), rows)]


def _cell(errors: Mapping[str, Any]) -> str:
    if errors["max_ratio"] is None or errors["not_finite"]:
        return "wrong"
    return f"{errors['max_ratio']:.3g} / {errors['rms_ratio']:.2g}"


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json holds: checks passed, thresholds, and our worst error over SGEMM's at few rows, by data."""
    few: dict[str, dict[str, float]] = {}
    for point in found["few_rows"]:
        for measure, name in (("max_ratio", "max_vs_sgemm"), ("rms_ratio", "rms_vs_sgemm")):
            if times := drawings.over(point, SPLIT, measure):
                worst = few.setdefault(point["data"], {})
                worst[name] = max(worst.get(name, 0.0), times)
    passed = {
        n: {"passed": sum(v["ok"] for v in each), "of": len(each)} for n, each in found["verdicts"].items()
    }
    return {"thresholds": found["thresholds"], "checks": passed, "cases": few}
