"""A record of gradings as tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gradings.data import BY_NAME
from benchmarks.gradings.products import RIVAL, SGEMM, SPLIT
from benchmarks.harness import plots
from benchmarks.harness.report import Table

_SHOWN_K = (16, 64, 256, 1024, 4096, 8192, 32768)
_NAMES = {"sgemm": "SGEMM", "tf32": "TF32", "split": "split", "scaled": "scaled"}


def _cell(errors: Mapping[str, Any]) -> str:
    if errors["max_ratio"] is None or errors["not_finite"]:
        return "wrong"
    return f"{errors['max_ratio']:.3g} / {errors['rms_ratio']:.2g}"


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Errors of the sweep, thresholds, what the range guard costs."""
    points = [p for p in record["sweep"] if p["k"] in _SHOWN_K]
    names = list(points[0]["errors"]) if points else []
    rows = [
        [BY_NAME[p["data"]].title, str(p["k"]), *(_cell(p["errors"][name]) for name in names)] for p in points
    ]
    title = "Largest / rms of |error| / (eps |A||B|), eps = 2^-24"
    found = [Table(title, ("data", "K", *(_NAMES[name] for name in names)), rows)]
    for arithmetic, by_data in record["thresholds"].items():
        rows = [[name, "never" if k is None else str(k)] for name, k in by_data.items()]
        title = f"{_NAMES[arithmetic]}: no less accurate than {_NAMES[RIVAL[arithmetic]]} from this K on"
        found.append(Table(title, ("data", "K"), rows))
    if guarded := record.get("guard", []):
        rows = [["x".join(map(str, g["shape"])), *(f"{ms:.3f}" for ms in g["ms"].values())] for g in guarded]
        title = "Range guard: ms of a call, by what is computed again"
        found.append(Table(title, ("M x N x K", *guarded[0]["ms"]), rows))
    return found


def remarks(record: Mapping[str, Any]) -> list[str]:
    """How many checks passed, and every one that did not."""
    lines = []
    for product, verdicts in record["verdicts"].items():
        failed = [v for v in verdicts if not v["ok"]]
        lines.append(f"{product}: {len(verdicts) - len(failed)} of {len(verdicts)} checks passed")
        lines += [f"  {v['name']}: {v['measure']}, limit {v['limit']}" for v in failed]
    return lines


def figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json holds: checks passed, thresholds, and our worst error over SGEMM's at few rows, by data."""
    few: dict[str, dict[str, float]] = {}
    for point in record.get("few_rows", []):
        ours, rival = (point["errors"][name] for name in (SPLIT, SGEMM))
        for key, name in (("max_ratio", "max_vs_sgemm"), ("rms_ratio", "rms_vs_sgemm")):
            if ours[key] and rival[key]:
                worst = few.setdefault(point["data"], {})
                worst[name] = max(worst.get(name, 0.0), ours[key] / rival[key])
    passed = {
        name: {"passed": sum(v["ok"] for v in verdicts), "of": len(verdicts)}
        for name, verdicts in record["verdicts"].items()
    }
    return {"thresholds": record["thresholds"], "checks": passed, "cases": few}


def _ratio_lines(record: Mapping[str, Any], data: str, arithmetic: str) -> dict[str, list[tuple[int, float]]]:
    """Maximum and rms over the rival's, for each K where both are numbers."""
    lines: dict[str, list[tuple[int, float]]] = {"largest error": [], "rms error": []}
    for point in record["sweep"]:
        if point["data"] != data or arithmetic not in point["errors"]:
            continue
        ours, rival = point["errors"][arithmetic], point["errors"][RIVAL[arithmetic]]
        for key, line in zip(("max_ratio", "rms_ratio"), lines.values(), strict=True):
            if ours[key] and rival[key]:
                line.append((point["k"], ours[key] / rival[key]))
    return lines


def write_plots(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """For each arithmetic one panel for each class: our error over the rival's, over K; as far as there is data."""
    written = []
    for arithmetic, rival in RIVAL.items():
        names = list(dict.fromkeys(p["data"] for p in record["sweep"] if arithmetic in p["errors"]))
        found = {BY_NAME[name].title: _ratio_lines(record, name, arithmetic) for name in names}
        title = (
            f"Error of the {_NAMES[arithmetic]} product over {_NAMES[rival]}'s, against K "
            f"(below 1: ours is more accurate)\n{plots.device_line(record['environment'])}"
        )
        if found:
            path = folder / f"gradings-{arithmetic}-over-{rival}.png"
            written.append(plots.panels(found, title, path))
    return written
