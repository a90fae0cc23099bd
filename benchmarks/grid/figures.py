"""A grid's record -> figures with one panel per (N, K): TFLOP/s over M, and the ratio to the peers over M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.grid.points import SOMEWHERE
from benchmarks.grid.tables import LEVEL, NEAR, Point, points, summarise
from benchmarks.records import OURS

_RATIO_RANGE = (0.7, 2.5)
_BEST = {"color": "black", "linewidth": 2.2, "marker": "o", "markersize": 4, "zorder": 4}


def write_figures(record: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """``tflops-NAME.png`` and, where a peer was measured, ``ratio-NAME.png``.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    layers: dict[tuple[int, int], list[Point]] = {}
    for point in points(record):
        layers.setdefault((point.n, point.k), []).append(point)
    if not layers:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = [_figure(record, layers, "TFLOP/s", _throughput, folder / f"tflops-{name}.png")]
    low, high = _RATIO_RANGE
    if any(point.best for series in layers.values() for point in series):
        what = f"their time over epigemm's (above 1: epigemm is faster), {low:g} to {high:g}"
        written.append(_figure(record, layers, what, _ratios, folder / f"ratio-{name}.png"))
    return written


def _figure(
    record: Mapping[str, Any],
    layers: Mapping[tuple[int, int], Sequence[Point]],
    what: str,
    draw: Any,
    path: Path,
) -> Path:
    plt = plots.pyplot()
    summary = summarise(record)
    title = f"{summary.problem}, {summary.arithmetic}: {what}\n{plots.device_line(record)}"
    figure, axes, legend = plots.panels(plt, len(layers), title)
    handles: dict[str, Any] = {}
    for panel, ((n, k), series) in zip(axes, layers.items(), strict=True):
        draw(panel, series)
        plots.rows_axis(panel, [point.m for point in series])
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(f"N = {n}, K = {k}", fontsize=10, loc="left")
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    legend.legend(handles.values(), handles.keys(), loc="center left", fontsize=10, frameon=False)
    return plots.save(plt, figure, path)


def _names(series: Sequence[Point]) -> list[str]:
    return plots.in_order({name for point in series for name in point.ratios})


def _throughput(panel: Any, series: Sequence[Point]) -> None:
    """Logarithmic, because a memory-bound point has a hundredth of a large one's rate."""
    for name in _names(series):
        # Their rate from the ratio: the fairest, as both times are from the same turns.
        theirs = [(p.m, p.tflops / p.ratios[name]) for p in series if name in p.ratios]
        panel.plot(*zip(*theirs, strict=True), **plots.line_style(name, dots=name in SOMEWHERE))
    panel.plot([p.m for p in series], [p.tflops for p in series], **plots.line_style(OURS))
    panel.set_yscale("log")


def _ratios(panel: Any, series: Sequence[Point]) -> None:
    plots.level_lines(panel, LEVEL, NEAR)
    low, high = _RATIO_RANGE
    for name in _names(series):
        shown = [(p.m, min(max(p.ratios[name], low), high)) for p in series if name in p.ratios]
        panel.plot(*zip(*shown, strict=True), **plots.line_style(name, dots=name in SOMEWHERE))
    best = [(p.m, min(max(p.to_best, low), high)) for p in series if p.best]
    if best:
        panel.plot(*zip(*best, strict=True), **_BEST, label="the best peer of each point")
    values = [value for _, value in best]
    panel.set_ylim(min(0.9, *values, 0.9) - 0.02, max(1.35, *values, 1.35) + 0.05)
