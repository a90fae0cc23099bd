"""``--redraw DIR``: the figures of the records below a folder, from what the records hold. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gradings import figures
from benchmarks.harness import plots
from benchmarks.harness.records import CaseResult
from benchmarks.harness.report import show
from benchmarks.kinds import Run, scatter

_DRAW: dict[str, plots.Draw] = {"bench": plots.speedups, "random": scatter.draw}


def main(run: Run) -> int:
    """Draw everything.

    Raises:
        ValueError: no record below the folder has figures.
    """
    top = Path(run.options.redraw)
    output = run.options.output or top
    written = [
        path for record in records(top) for path in redraw(record, output / record.parent.relative_to(top))
    ]
    if not written:
        raise ValueError(f"--redraw: no record.json or gradings.json with figures below {top}")
    show([], [f"wrote {path}" for path in written])
    return 0


def records(top: Path) -> Iterator[Path]:
    """The records below a folder that have figures."""
    for path in sorted([*top.rglob("record.json"), *top.rglob("gradings.json")]):
        if path.name == "gradings.json" or _read(path)["kind"] in _DRAW:
            yield path


def redraw(record: Path, folder: Path) -> list[Path]:
    """The figures of a record, into a folder."""
    found = _read(record)
    if record.name == "gradings.json":
        return figures.draw(found, found["environment"], folder)
    cases = [CaseResult.loaded(case) for case in found["cases"]]
    return _DRAW[found["kind"]](cases, found["environment"], folder)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
