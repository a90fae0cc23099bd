"""Plots of a small record: what they show, and what is written into their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Case, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.harness import plots
from benchmarks.harness.records import EAGER, OURS, CaseResult, Group, Measurement, Timing

ABOUT: dict[str, Any] = {"gpu": {"name": "a GPU"}, "cpu": {"name": "a CPU"}, "torch": "2.13"}


def result(setting: Setting, ms: dict[str, float], *, training: bool = False) -> CaseResult:
    """A case whose alternatives took so long."""
    problem = next(p for p in problems() if p.name == "linear/scale_batch_norm" + ":train" * training)
    found = CaseResult.of(Case(problem, Shape(128, 256, 512), setting))
    taken = [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()]
    found.groups.append(Group("turn 1", taken))
    return found


def test_a_file_is_small(tmp_path: Path) -> None:
    case = result(Setting("bf16", "highest"), {OURS: 2.0, EAGER: 3.0})
    (path,) = plots.speedups([case], ABOUT, tmp_path / "new")
    assert path.read_bytes().startswith(b"\x89PNG") and 2000 < path.stat().st_size < 100_000
