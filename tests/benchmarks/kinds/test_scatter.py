"""The figures of random shapes: against the best baseline, with the summary's geometric means."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Case, Shape
from benchmarks.cases.random import LAYERS, SERIES, Series
from benchmarks.harness.records import (
    ADDMM,
    COMPILE,
    EAGER,
    OURS,
    PLAIN,
    CaseResult,
    Group,
    Measurement,
    Timing,
)
from benchmarks.kinds import scatter
from benchmarks.kinds.points import summarise
from tests.support.figures import drawn

ABOUT: dict[str, Any] = {"gpu": {"name": "a GPU"}, "cpu": {"name": "a CPU"}, "torch": "2.13"}
BY_NAME = {series.name: series for series in SERIES}
RELU, SIGMOID = BY_NAME["bias_relu/bf16"], BY_NAME["sigmoid_scale_residual/bf16"]
BETWEEN = BY_NAME["between/bias_relu/bf16"]
PACKED, SPLIT = BY_NAME["bias_relu/fp32_highest_packed"], BY_NAME["bias_relu/fp32_highest_plain"]


def point(series: Series, shape: Shape, *turns: dict[str, float]) -> CaseResult:
    """A case of a series, by microseconds of each turn."""
    found = CaseResult.of(Case(series.problem, shape, series.setting))
    for turn in turns:
        taken = [Measurement(name, name, in_turn=Timing.of([us / 1e3])) for name, us in turn.items()]
        found.groups.append(Group("turn", taken))
    return found


def figures(monkeypatch: pytest.MonkeyPatch, cases: list[CaseResult]) -> dict[str, Any]:
    return drawn(monkeypatch, lambda folder: scatter.draw(cases, ABOUT, folder))


SMALL, LARGE = Shape(8, 16, 24), Shape(4096, 4000, 4000)


def test_the_ratio_is_to_the_best_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to eager; of three turns the median counts; what was not timed is no point."""
    cases = [
        point(RELU, SMALL, {OURS: 20, EAGER: 40, ADDMM: 25}),
        point(RELU, LARGE, *[{OURS: us, EAGER: 400.0, ADDMM: 500.0} for us in (500.0, 400.0, 200.0)]),
        point(RELU, Shape(1, 16, 24), {EAGER: 40}),
    ]
    found = scatter.Points.of(RELU, cases)
    assert found.ratios == pytest.approx([1.25, 1.0]) and found.rows == [8, 4096]
    assert found.flops == [2 * 8 * 16 * 24, 2 * 4096 * 4000 * 4000]
    (figure,) = figures(monkeypatch, cases).values()
    axes, colours = figure.axes
    mean = summarise(RELU, cases)["geomean"]
    assert axes.lines[1].get_ydata() == [mean, mean] and mean == pytest.approx(1.25**0.5)
    assert axes.get_legend().texts[0].get_text() == f"geometric mean: {mean:.2f}"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert list(axes.collections[0].get_array()) == [8, 4096] and colours.get_ylabel() == "M, rows of x"
    assert figure.get_supxlabel().endswith("(FLOP)")
    title = figure.get_suptitle()
    assert "relu(z + bias) in bf16" in title and "eager PyTorch and torch._addmm_activation\n" in title


def test_series_have_panels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {OURS: 20.0, PLAIN: 40.0, EAGER: 40.0, ADDMM: 60.0}
    between = Shape(520, *LAYERS[0])
    cases = [point(RELU, SMALL, times), point(RELU, between, times), point(PACKED, SMALL, times)]
    found = figures(monkeypatch, cases)
    assert sorted(found) == ["random-linear_bias_relu-bf16.png", "random-linear_bias_relu-fp32_highest.png"]

    def titles(name: str) -> list[str]:
        return [axes.get_title(loc="left") for axes in found[name].axes if axes.lines]

    assert titles("random-linear_bias_relu-bf16.png") == [
        "1 random shapes",
        "1 shapes, M between powers of two",
    ]
    assert titles("random-linear_bias_relu-fp32_highest.png") == [
        "1 random shapes, weight packed",
        "1 random shapes, weight split per call",
    ]
    ratios = [scatter.Points.of(series, cases).ratios for series in (BETWEEN, PACKED, SPLIT)]
    assert ratios == [pytest.approx([2.0]), pytest.approx([2.0]), pytest.approx([1.0])]


def test_a_baseline_that_ran_at_few_shapes_is_named_so() -> None:
    cases = [
        point(SIGMOID, SMALL, {OURS: 20, EAGER: 40, COMPILE: 25}),
        point(SIGMOID, LARGE, {OURS: 200, EAGER: 400}),
    ]
    panels = {SIGMOID: scatter.Points.of(SIGMOID, cases)}
    assert scatter.baselines(panels) == "eager PyTorch and torch.compile (at 1 of 2 shapes)"


@pytest.mark.parametrize("span", [(0.85, 1.6), (0.9, 6.0), (0.6, 1.3), (0.05, 20.0)])
def test_ticks_have_room(span: tuple[float, float]) -> None:
    ticks = scatter._ticks(*span)
    assert 1.0 in ticks and 3 <= len(ticks) <= 15
    assert all(span[0] <= tick <= span[1] for tick in ticks)
