"""The documentation is finished: nothing in it waits to be filled in."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix == ".md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_placeholders_are_left(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    left = [f"{number}: {line}" for number, line in enumerate(lines, 1) if "{{" in line or "}}" in line]
    assert not left, left[0]
