"""The plots of the gradings: every class once, on one scale, with the K at which the planner switches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.gradings import figures
from benchmarks.gradings.data import BY_NAME
from benchmarks.gradings.products import BASELINE, SCALED, SPLIT
from benchmarks.harness import plots

FAMILY = Path(__file__).parents[3] / "csrc" / "gemm" / "fp16_slices" / "coverage.cpp"
ABOUT: dict[str, Any] = {"gpu": {"name": "a GPU"}, "cpu": {"name": "a CPU"}, "torch": "2.13"}


def sweep(**factors: float) -> list[dict[str, Any]]:
    """Every class at three K; our largest error so many times the other's, our rms error half of that."""
    both = [(ours, factors.get(ours, 1.0), other) for ours, other in BASELINE.items()]
    errors: dict[str, dict[str, float]] = {}
    for ours, factor, other in both:
        errors[ours] = {"max_ratio": 3.0 * factor, "rms_ratio": 1.5 * factor}
        errors[other] = {"max_ratio": 3.0, "rms_ratio": 3.0}
    return [{"data": data, "k": k, "errors": errors} for data in BY_NAME for k in (1, 128, 4096)]


def drawn(monkeypatch: pytest.MonkeyPatch, found: list[dict[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        kept[path.name] = figure
        return path

    monkeypatch.setattr(plots, "save", keep)
    figures.draw({"sweep": found}, ABOUT, Path())
    return kept


def test_every_class_is_in_one_panel() -> None:
    of = [data for beginnings in figures.PANELS.values() for data in BY_NAME if data.startswith(beginnings)]
    assert sorted(of) == sorted(BY_NAME)
    most = max(sum(data.startswith(of) for data in BY_NAME) for of in figures.PANELS.values())
    assert most <= len(figures._COLOURS)


def test_lines_are_ratios_on_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawn(monkeypatch, sweep(split=0.5, scaled=1e4))
    assert sorted(found) == ["gradings-scaled-over-tf32.png", "gradings-split-over-sgemm.png"]
    split = found["gradings-split-over-sgemm.png"]
    assert len(split.axes) == len(figures.PANELS) <= 6
    assert len({axes.get_ylim() for axes in split.axes}) == len({axes.get_xlim() for axes in split.axes}) == 1
    for axes in split.axes:
        *lines, one, at = axes.lines
        assert {tuple(line.get_ydata()) for line in lines} == {(0.5,) * 3, (0.25,) * 3}
        assert all(list(line.get_xdata()) == [1, 128, 4096] for line in lines)
        assert one.get_ydata() == [1.0, 1.0] and at.get_xdata() == [128, 128]
    assert "from K = 128 on" in split.get_suptitle()
    scaled = found["gradings-scaled-over-tf32.png"]
    assert "from K = 16 to 8192" in scaled.get_suptitle()


def test_a_missing_error_is_left_out() -> None:
    found = sweep()
    found[0]["errors"] = {**found[0]["errors"], SPLIT: {"max_ratio": None, "rms_ratio": 1.0}}
    assert 1 not in figures.lines(found, SPLIT, "max_ratio")[found[0]["data"]]
    assert figures.over({"errors": {}}, SPLIT, "max_ratio") is None


def test_the_planner_asks_for_these_k() -> None:
    text = FAMILY.read_text(encoding="utf-8")

    def constant(name: str) -> int:
        match = re.search(rf"\b{name} = (\d+)[,;]", text)
        assert match is not None
        return int(match[1])

    assert figures.CHOSEN[SPLIT] == (constant("kLeastK"),)
    assert figures.CHOSEN[SCALED] == (constant("kLeastScaledK"), constant("kMostScaledK"))
