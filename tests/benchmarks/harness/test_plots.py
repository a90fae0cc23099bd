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
from tests.support.figures import drawn

ABOUT: dict[str, Any] = {"gpu": {"name": "a GPU"}, "cpu": {"name": "a CPU"}, "torch": "2.13"}


def result(setting: Setting, ms: dict[str, float], *, training: bool = False) -> CaseResult:
    """A case whose alternatives took so long."""
    problem = next(p for p in problems() if p.name == "linear/scale_batch_norm" + ":train" * training)
    found = CaseResult.of(Case(problem, Shape(128, 256, 512), setting))
    taken = [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()]
    found.groups.append(Group("turn 1", taken))
    return found


def figures(monkeypatch: pytest.MonkeyPatch, cases: list[CaseResult]) -> dict[str, Any]:
    return drawn(monkeypatch, lambda folder: plots.speedups(cases, ABOUT, folder))


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


def test_a_file_says_what_it_shows(tmp_path: Path) -> None:
    case = result(Setting("bf16", "highest"), {OURS: 2.0, EAGER: 3.0})
    (path,) = plots.speedups([case], ABOUT, tmp_path / "new")
    assert path.read_bytes().startswith(b"\x89PNG") and 2000 < path.stat().st_size < 100_000
    (again,) = plots.speedups([case], ABOUT, tmp_path / "again")
    assert plots.content_of(path) == plots.content_of(again) != ""
    other = result(Setting("bf16", "highest"), {OURS: 2.0, EAGER: 3.1})
    (changed,) = plots.speedups([other], ABOUT, tmp_path / "other")
    assert plots.content_of(changed) != plots.content_of(path)


@pytest.mark.parametrize("change", ["title", "scale", "label", "point", "colour", "legend"])
def test_every_part_of_a_figure_is_part_of_its_content(change: str) -> None:
    def draw(changed: str = "") -> str:
        figure, axes = plots.pyplot().subplots()
        axes.plot([1, 2], [1, 3 if changed == "point" else 2], color="r" if changed == "colour" else "b")
        axes.lines[0].set_label("a" if changed == "legend" else "b")
        axes.set_title("a" if changed == "title" else "b", loc="left")
        axes.set_yscale("log" if changed == "scale" else "linear")
        figure.supxlabel("a" if changed == "label" else "b")
        axes.legend()
        found = plots.content(figure)
        plots.pyplot().close(figure)
        return found

    assert draw() == draw() != draw(change)
