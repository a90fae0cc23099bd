"""How far a run has come: a line a step, or of many steps a line a second."""

from __future__ import annotations

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")

from benchmarks.harness.progress import shown_progress


@pytest.mark.parametrize(("steps", "lines"), [(3, 3), (1000, 1)])
def test_lines(steps: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(steps) as progress:
        for step in range(steps):
            progress(f"step {step}: timing", False)
            progress(f"step {step}", True)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == lines and f"{steps}/{steps} step {steps - 1}" in shown[-1]
