"""Every benchmark command in the documentation is accepted by the benchmarks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cli import kind_of, parser

TOP = Path(__file__).parents[2]
PAGES = [
    TOP / "README.md",
    *sorted((TOP / "docs").glob("*.md")),
    *sorted((TOP / "benchmarks/results").rglob("notes.md")),
]


def commands() -> list[str]:
    """Without what stands in for a number or is left out."""
    found: list[str] = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        found += re.findall(r"python -m benchmarks( [^`#\n]*|)(?=[`#\n])", text)
    return [command.replace("SEED", "1").replace(" N", " 2") for command in found if "..." not in command]


def test_there_are_commands() -> None:
    assert len(commands()) > 5


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_documented_command_is_taken(command: str) -> None:
    options = parser().parse_args(shlex.split(command))
    kind = kind_of(options)
    assert kind == "bench" or getattr(options, kind) not in (None, False)
