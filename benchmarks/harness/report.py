"""Records -> files and what the console shows: the one writer of records and of tables."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, plots
from benchmarks.harness.records import CaseResult, not_run

SCHEMA = 2
_FEW_STEPS = 200


def finite(value: Any) -> Any:
    """Plain data that JSON can hold: JSON knows no NaN and no infinity: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def write_json(record: Mapping[str, Any], path: Path) -> Path:
    """Write by replacing, so that a run that is killed leaves its last complete record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = json.dumps(finite(record), indent=1, allow_nan=False)
    # Lists of numbers alone stand in one line. No string holds a line break.
    text = re.sub(r"\[\n([-+.\de,\s]+)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    partial.write_text(text + "\n")
    return partial.replace(path)


def progress(total: int) -> Callable[[str], None]:
    """To be told each step that is finished: a line for each on standard error; of many, one line a second."""
    started = shown = time.monotonic()
    done = 0

    def told(text: str) -> None:
        nonlocal done, shown
        done, now = done + 1, time.monotonic()
        if total <= _FEW_STEPS or done == total or now - shown >= 1.0:
            print(f"[{now - started:6.1f} s] {done}/{total} {text}", file=sys.stderr, flush=True)
            shown = now

    return told


def number(value: float | None, form: str = ".3f") -> str:
    """As the format says; empty for None."""
    return "" if value is None else format(value, form)


@dataclass(frozen=True)
class Table:
    """Title, column heads, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As Markdown, the title as a heading."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        return "\n".join([f"## {self.title}", "", *(f"| {line} |" for line in cells), ""])


def show(tables: Sequence[Table], lines: Sequence[str] = ()) -> None:
    """Tables as they are written, then lines, on standard output.

    Raises:
        SystemExit: rich is not installed; names the extra that installs it.
    """
    try:
        import rich.box
        import rich.console
        import rich.table
        from rich.text import Text
    except ImportError:
        raise SystemExit(f"the benchmarks need rich for their tables: {plots.INSTALL}") from None
    console = rich.console.Console()
    if not console.is_terminal:  # a pipe has no width of its own, and 80 columns would fold every table
        console = rich.console.Console(width=180, color_system=None)
    for each in tables:
        table = rich.table.Table(title=Text(each.title), title_justify="left", box=rich.box.SIMPLE_HEAD)
        for index, column in enumerate(each.columns):
            left: Any = {"justify": "right" if index else "left", "no_wrap": not index}
            table.add_column(Text(column), overflow="fold", **left)
        for row in each.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def write_page(path: Path, head: Sequence[str], tables: Sequence[Table], remarks: Sequence[str]) -> Path:
    """Tables as Markdown, below a title and paragraphs, then remarks."""
    text = [line for paragraph in (f"# {head[0]}", *head[1:]) for line in (paragraph, "")]
    text += [table.markdown() for table in tables] + [f"- {remark}" for remark in remarks]
    path.write_text("\n".join(text) + "\n")
    return path


@dataclass
class Record:
    """One run: what it is, where, how, and what has come out. All kinds of records are written by it.

    Attributes:
        kind: "bench", "custom", "random", "host", "models", "kernelbench", "gradings".
        about: the environment.
        method: how it was measured, in words.
        folder: where it goes, if anywhere.
        effort: how it was measured, in numbers.
        absent: alternative -> why this machine does not have it.
        results: the cases in full.
        figures: what the summary holds besides, "cases" above all.
        complete: whether it is all there.
    """

    kind: str
    about: Mapping[str, Any]
    method: str
    folder: Path | None
    effort: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    @property
    def _head(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": self.kind, "complete": self.complete}

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        about = environment.identity(self.about) | {"cpu": self.about["cpu"]["name"]}
        how = {"effort": self.effort, "method": self.method, "absent": self.absent}
        how["packages"] = self.about["packages"]
        plain: dict[str, Any] = finite(
            self._head | about | how | {"not_run": not_run(self.results)} | self.figures
        )
        return plain

    def write(self) -> list[Path]:
        """``summary.json``, and of cases in full ``record.json``."""
        if self.folder is None:
            return []
        written = [write_json(self.summary(), self.folder / "summary.json")]
        if self.results:
            written.append(write_json(self._full(), self.folder / "record.json"))
        return written

    def _full(self) -> dict[str, Any]:
        how = {"environment": self.about, "effort": self.effort, "absent": self.absent}
        return self._head | how | {"cases": [dataclasses.asdict(result) for result in self.results]}

    def finish(
        self, tables: Sequence[Table], remarks: Sequence[str] = (), draw: plots.Draw | None = None
    ) -> None:
        """Write everything, with ``tables.md`` and what `draw` makes of the cases, and show it."""
        self.complete = True
        remarks = [*remarks, *(f"{name}: not here: {why}" for name, why in self.absent.items())]
        for name, reasons in not_run(self.results).items():
            remarks += [f"{name}: {why} ({len(cases)} cases)" for why, cases in reasons.items()]
        written = self.write()
        if self.folder is not None:
            if draw is not None:
                written += draw(self.results, self.about, self.folder)
            command = f"`{' '.join(self.about['command'])}`"
            head = [environment.headline(self.about), command, self.method]
            written.append(write_page(self.folder / "tables.md", head, tables, remarks))
        show(tables, [*remarks, *(f"wrote {path}" for path in written)])
