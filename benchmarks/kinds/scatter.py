"""The figures of ``--random``: the best baseline's time over ours at each shape, over the product's size."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases.random import LAYERS, ROWS, SERIES, Series
from benchmarks.harness import plots
from benchmarks.harness.records import PLAIN, CaseResult
from benchmarks.kinds.points import counted

_COLUMNS, _SIZE = 2, (4.6, 3.5)  # inches of a panel
_TICKS = (0.1, 0.2, 0.5, 2, 3, 4, 5, 8, 0.7, 1.5, 0.8, 0.9, 1.1, 1.2)  # the first ones before the others
_MOST_TICKS = 14


def draw(cases: Sequence[CaseResult], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """A file for each function and arithmetic, in it a panel for each series; all panels have one scale."""
    written = []
    for (problem, dtype, precision), group in _functions().items():
        panels = {series: found for series in group if (found := Points.of(series, cases)).ratios}
        if panels:
            of = "_".join(filter(None, (dtype, precision)))
            path = folder / plots.file_name("random", problem, of)
            written.append(plots.save(_figure(panels, about), path))
    return written


def _function(series: Series) -> tuple[str, str, str]:
    """Problem, type and precision, as cases have them."""
    dtype = series.setting.dtype_name
    return series.problem.name, dtype, series.setting.precision if dtype == "fp32" else ""


def _functions() -> dict[tuple[str, str, str], list[Series]]:
    found: dict[tuple[str, str, str], list[Series]] = {}
    for series in SERIES:
        found.setdefault(_function(series), []).append(series)
    return found


@dataclass(frozen=True)
class Points:
    """The shapes of a series that have a ratio.

    Attributes:
        flops: 2 M N K of each shape.
        ratios: the time of the best baseline over ours, in the turn that counts.
        rows: M.
        ran: at how many shapes each baseline has a time.
    """

    flops: list[float]
    ratios: list[float]
    rows: list[int]
    ran: dict[str, int]

    @classmethod
    def of(cls, series: Series, cases: Sequence[CaseResult]) -> Points:
        """Those of a series among the cases of a record."""
        found = cls([], [], [], dict.fromkeys(series.baselines, 0))
        function = _function(series)
        for case in cases:
            is_between = tuple(case.shape[1:]) in LAYERS
            if (case.problem, case.dtype, case.precision) == function and is_between == series.between:
                found._add(series, case)
        return found

    def _add(self, series: Series, case: CaseResult) -> None:
        us = counted(series, case)
        ratio = series.ratio(us)
        if ratio is not None:
            self.flops.append(float(case.flops))
            self.ratios.append(ratio)
            self.rows.append(case.shape[0])
            for name in self.ran:
                self.ran[name] += name in us


def title(series: Series, count: int) -> str:
    """Which shapes, and of fp32 products how ours is called."""
    shapes = "shapes, M between powers of two" if series.between else "random shapes"
    if series.setting.dtype_name != "fp32":
        return f"{count} {shapes}"
    return f"{count} {shapes}, weight {'split per call' if series.own == PLAIN else 'packed'}"


def baselines(panels: Mapping[Series, Points]) -> str:
    """What the ratios are to, and of one that did not run everywhere at how many shapes it ran."""
    count = sum(len(found.ratios) for found in panels.values())
    ran = {
        name: sum(found.ran[name] for found in panels.values())
        for series in panels
        for name in series.baselines
    }
    parts = [
        plots.STYLES[name][1] + f" (at {times} of {count} shapes)" * (times < count)
        for name, times in ran.items()
    ]
    return " and ".join(parts)


def _figure(panels: Mapping[Series, Points], about: Mapping[str, Any]) -> Any:
    """All panels of one function in one arithmetic."""
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    size = (_SIZE[0] * columns + 0.9, _SIZE[1] * rows + 0.7)
    figure, grid = plots.pyplot().subplots(
        rows, columns, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    dots = [_panel(axes, *each) for axes, each in zip(grid.flat, panels.items(), strict=False)]
    _scales(grid.flat[0], [ratio for found in panels.values() for ratio in found.ratios])
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("size of the product, 2 M N K (FLOP)", fontsize=10)
    figure.supylabel("time of the best baseline / ours", fontsize=10)
    figure.colorbar(dots[0], ax=grid, label="M, rows of x", pad=0.01)
    series = next(iter(panels))
    of = plots.arithmetic(*_function(series)[1:])
    what = f"{series.problem.formula} in {of}. Best baseline: the faster of {baselines(panels)}"
    figure.suptitle(f"{what}\n{plots.device_line(about)}", fontsize=10, x=0.01, ha="left")
    return figure


def _panel(axes: Any, series: Series, found: Points) -> Any:
    """The points of a series, M by colour, and their geometric mean as a line; the points, for the scale of colours."""
    colours: Any = importlib.import_module("matplotlib.colors")
    by_rows = {"c": found.rows, "cmap": "viridis", "norm": colours.LogNorm(*ROWS)}
    dots = axes.scatter(found.flops, found.ratios, s=12, zorder=3, **by_rows)
    mean = statistics.geometric_mean(found.ratios)
    axes.axhline(1.0, color=plots.GREY, linewidth=1.0)
    line = {"color": plots.STYLES[series.own][0], "linewidth": 1.4}
    axes.axhline(mean, label=f"geometric mean: {mean:.2f}", **line)
    axes.set_title(title(series, len(found.ratios)), fontsize=10, loc="left")
    axes.legend(fontsize=9, loc="upper left")
    axes.grid(alpha=0.3)
    return dots


def _scales(axes: Any, ratios: Sequence[float]) -> None:
    """Logarithmic, with plain numbers at the ratios' own ticks."""
    ticker: Any = importlib.import_module("matplotlib.ticker")
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = min(*ratios, 0.9) / 1.05, max(*ratios, 1.1) * 1.15
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(ticker.FixedLocator(_ticks(low, high)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _ticks(low: float, high: float) -> list[float]:
    """Plain numbers, 1 above all, none too close to its neighbours."""
    apart = math.log(high / low) / _MOST_TICKS
    found = [1.0]
    for tick in _TICKS:
        if low <= tick <= high and all(abs(math.log(tick / other)) >= apart for other in found):
            found.append(tick)
    return sorted(found)
