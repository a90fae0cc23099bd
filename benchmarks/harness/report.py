"""Records -> files and what the console shows: the one writer of records and of tables."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, plots
from benchmarks.harness.records import CaseResult, not_run

SCHEMA = 2


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
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return partial.replace(path)


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


class Console:
    """Standard output.

    Raises:
        SystemExit: rich is not installed; names the extra that installs it.
    """

    def __init__(self) -> None:
        try:
            import rich.box
            import rich.console
            import rich.table
        except ImportError:
            raise SystemExit(f"the benchmarks need rich for their tables: {plots.INSTALL}") from None
        self._table_type, self._box = rich.table.Table, rich.box.SIMPLE_HEAD
        # A pipe has no width of its own, and 80 columns would fold every table.
        self._console = rich.console.Console()
        if not self._console.is_terminal:
            self._console = rich.console.Console(width=180, color_system=None)

    def line(self, text: str) -> None:
        """One line of text."""
        self._console.print(text, highlight=False, markup=False)

    def show(self, tables: Sequence[Table], remarks: Sequence[str] = ()) -> None:
        """Tables as they are written, then lines."""
        for each in tables:
            table = self._table_type(title=_plain(each.title), title_justify="left", box=self._box)
            for index, column in enumerate(each.columns):
                left: Any = {"justify": "right" if index else "left", "no_wrap": not index}
                table.add_column(_plain(column), overflow="fold", **left)
            for row in each.rows:
                table.add_row(*map(_plain, row))
            self._console.print(table)
        for remark in remarks:
            self.line(remark)


def _plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", "\\[")


@dataclass
class Record:
    """One run: what it is, where, how, and what has come out. All kinds of records are written by it.

    Attributes:
        kind: "bench", "custom", "random", "host", "tune", "models", "gradings".
        about: the environment.
        method: how it was measured, in words.
        effort: the same in numbers.
        absent: alternative -> why this machine does not have it.
        results: the cases in full.
        figures: what the summary holds besides, "cases" above all.
        complete: whether it is all there.
    """

    kind: str
    about: Mapping[str, Any]
    method: str
    effort: Mapping[str, Any]
    absent: Mapping[str, str]
    results: list[CaseResult]
    figures: dict[str, Any]
    complete: bool = False

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        about = environment.identity(self.about) | {"cpu": self.about["cpu"]["name"]}
        about["packages"] = self.about["packages"]
        head = {"schema": SCHEMA, "kind": self.kind, "complete": self.complete, **about}
        head |= {"effort": self.effort, "method": self.method, "absent": self.absent}
        plain_data: dict[str, Any] = finite(head | {"not_run": not_run(self.results), **self.figures})
        return plain_data

    def full(self) -> dict[str, Any]:
        """What record.json holds."""
        head = {"schema": SCHEMA, "kind": self.kind, "complete": self.complete, "environment": self.about}
        head |= {"effort": self.effort, "absent": self.absent}
        plain_data: dict[str, Any] = finite(head | {"cases": [dataclasses.asdict(r) for r in self.results]})
        return plain_data

    def remarks(self) -> list[str]:
        """What was not run, and why."""
        found = [f"{name}: not here: {why}" for name, why in self.absent.items()]
        for name, reasons in not_run(self.results).items():
            found += [f"{name}: {why} ({len(cases)} cases)" for why, cases in reasons.items()]
        return found

    def write(self, folder: Path, tables: Sequence[Table] = (), remarks: Sequence[str] = ()) -> list[Path]:
        """``summary.json``; of cases in full ``record.json``; with tables ``tables.md`` and plots."""
        written = [write_json(self.summary(), folder / "summary.json")]
        if self.results:
            full = self.full()
            written.append(write_json(full, folder / "record.json"))
            if tables and self.kind != "custom":
                written += plots.write_plots(full, folder)
        if tables:
            command = f"`{' '.join(self.about['command'])}`"
            text = [f"# {environment.headline(self.about)}", "", command, "", self.method, ""]
            text += [table.markdown() for table in tables] + [f"- {remark}" for remark in remarks]
            (folder / "tables.md").write_text("\n".join(text) + "\n")
            written.append(folder / "tables.md")
        return written

    def finish(
        self, console: Console, folder: Path | None, tables: Sequence[Table], remarks: Sequence[str] = ()
    ) -> None:
        """Write everything, where there is a folder, and show it."""
        written = self.write(folder, tables, remarks) if folder else []
        console.show(tables, [*remarks, *(f"wrote {path}" for path in written)])
