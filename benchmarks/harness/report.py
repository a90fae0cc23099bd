"""Records -> files and what the console shows: the one writer of tables."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
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


def write_json(record: Mapping[str, Any], path: Path) -> None:
    """Write by replacing, so that a run that is killed leaves its last complete record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def arithmetic(case: Mapping[str, Any]) -> str:
    """``fp32 highest``, ``bf16``, ..."""
    return f"fp32 {case['precision']}" if case["dtype"] == "fp32" else str(case["dtype"])


def plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", "\\[")


def number(value: float | None, digits: int = 3) -> str:
    """With so many decimals; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Four digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


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
    """Tables on standard output.

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

    def line(self, text: str = "") -> None:
        """One line of text, with rich's markup."""
        self._console.print(text, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Any table: first column left, the others right."""
        table = self._table_type(
            title=title, title_justify="left", title_style="bold", pad_edge=False, box=self._box
        )
        for index, column in enumerate(columns):
            left = index == 0
            table.add_column(column, justify="left" if left else "right", no_wrap=left, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def show(self, tables: Sequence[Table], remarks: Sequence[str] = ()) -> None:
        """Tables as they are written, then lines."""
        for table in tables:
            self.table(plain(table.title), table.columns, ([plain(c) for c in row] for row in table.rows))
        for remark in remarks:
            self.line(plain(remark))


@dataclass
class Record:
    """One run: what it is, where, how, and what has come out. All kinds of records are written by it.

    Attributes:
        kind: "bench", "custom", "random", "host", "tune".
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
        plain_data: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "kind": self.kind,
                "complete": self.complete,
                **environment.identity(self.about),
                "cpu": self.about["cpu"]["name"],
                "packages": self.about["packages"],
                "effort": self.effort,
                "method": self.method,
                "absent": self.absent,
                "not_run": not_run(self.results),
                **self.figures,
            }
        )
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
        """``summary.json``; ``record.json`` where there are cases in full; with tables ``tables.md``."""
        summary = self.summary()
        write_json(summary, folder / "summary.json")
        written, full = [folder / "summary.json"], self.full()
        if self.results:
            write_json(full, folder / "record.json")
            written.append(folder / "record.json")
            if tables and self.kind != "custom":
                written += plots.write_plots(full, folder)
        if tables:
            text = [
                f"# {environment.headline(self.about)}",
                "",
                f"`{summary['command']}`",
                "",
                self.method,
                "",
            ]
            text += [table.markdown() for table in tables] + [f"- {remark}" for remark in remarks]
            (folder / "tables.md").write_text("\n".join(text) + "\n")
            written.append(folder / "tables.md")
        return written
