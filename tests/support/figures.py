"""What plots draw, without their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import plots


def drawn(monkeypatch: pytest.MonkeyPatch, draw: Callable[[Path], object]) -> dict[str, Any]:
    """The figures that `draw` makes in a folder, by the file's name."""
    found: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        found[path.name] = figure
        return path

    monkeypatch.setattr(plots, "save", keep)
    draw(Path())
    return found
