"""Plots of a small record: what they show, and what is written into their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Case, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.harness import plots
from benchmarks.harness.records import EAGER, MM, OURS, CaseResult, Group, Measurement, Timing

ABOUT: dict[str, Any] = {"gpu": {"name": "a GPU"}, "cpu": {"name": "a CPU"}, "torch": "2.13"}


def result(setting: Setting, ms: dict[str, float], *, training: bool = False) -> CaseResult:
    """A case whose alternatives took so long."""
    problem = next(p for p in problems() if p.name == "linear/scale_batch_norm" + ":train" * training)
    found = CaseResult.of(Case(problem, Shape(128, 256, 512), setting))
    taken = [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()]
    found.groups.append(Group("turn 1", taken))
    return found


def figures(monkeypatch: pytest.MonkeyPatch, cases: list[CaseResult]) -> dict[str, Any]:
    """What is drawn, without its files."""
    found: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        found[path.name] = figure
        return path

    monkeypatch.setattr(plots, "save", keep)
    plots.speedups(cases, ABOUT, Path())
    return found


def test_bars_are_times_of_eager_over_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        result(Setting("bf16", "highest"), {OURS: 2.0, EAGER: 3.0, MM: 6.0}),
        result(Setting("bf16", "highest"), {OURS: 1.0, EAGER: 4.0}, training=True),
        result(Setting("fp32", "high"), {OURS: 1.0, EAGER: 2.0}),
        result(Setting("fp16", "highest"), {MM: 1.0, EAGER: 2.0}),
    ]
    found = figures(monkeypatch, cases)
    assert sorted(found) == ["speedup-linear-bf16.png", "speedup-linear-fp32_high.png"]
    (axes,) = found["speedup-linear-bf16.png"].axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 4.0, 0.5]
    assert [text.get_text() for text in axes.texts] == ["1.50", "4.00", "0.50"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "batch_norm(scale * z)\n128 x 256 x 512",
        "batch_norm(scale * z), training\n128 x 256 x 512",
    ]
    assert axes.get_title(loc="left") == "Linear layers in bf16\na GPU, torch 2.13"
    (axes,) = found["speedup-linear-fp32_high.png"].axes
    assert axes.get_title(loc="left").startswith("Linear layers in fp32 at precision high\n")


def test_a_file_is_small(tmp_path: Path) -> None:
    case = result(Setting("bf16", "highest"), {OURS: 2.0, EAGER: 3.0})
    (path,) = plots.speedups([case], ABOUT, tmp_path / "new")
    assert path.read_bytes().startswith(b"\x89PNG") and 2000 < path.stat().st_size < 100_000
