"""The figures of the gradings: our error over that of the product that ours stands in for, over K."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gradings.data import BY_NAME
from benchmarks.gradings.products import BASELINE, SCALED, SPLIT
from benchmarks.harness import plots

# Classes of data that are alike, by the beginnings of their names.
PANELS = {
    "uniform and normal": ("uniform_linear", "normal", "positive"),
    "one exponent per element": ("wide_",),
    "one exponent per row": ("rows_",),
    "one exponent per column": ("columns_",),
    "outliers": ("outlier_",),
    "sparse": ("sparse_",),
}
# The K from which on, and up to which, the planner may choose an arithmetic (csrc/gemm/fp16_slices/coverage.cpp).
CHOSEN: dict[str, tuple[int, ...]] = {SPLIT: (128,), SCALED: (16, 8192)}
_TITLES = {SPLIT: "fp16x3", SCALED: "fp16x1", "sgemm": "SGEMM", "tf32": "TF32"}
_STYLES = {"max_ratio": "-", "rms_ratio": "--"}
_COLOURS = ("#d1495b", "#30638e", "#edae49", "#3c8d5a", "#6d597a", "#00798c")
_COLUMNS = 3
_MOST_FOR_TWO = 1000.0


def over(point: Mapping[str, Any], arithmetic: str, measure: str) -> float | None:
    """Our error over that of the product it stands in for; None unless both are numbers."""
    errors = point["errors"]
    if arithmetic not in errors:
        return None
    ours, other = errors[arithmetic][measure], errors[BASELINE[arithmetic]][measure]
    return ours / other if ours and other else None


def draw(found: Mapping[str, Any], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """A file for each arithmetic: panels of classes that are alike, all on one scale."""
    return [
        plots.save(
            _figure(found["sweep"], arithmetic, plots.device_line(about)),
            folder / plots.file_name("gradings", arithmetic, "over", baseline),
        )
        for arithmetic, baseline in BASELINE.items()
    ]


def lines(sweep: Sequence[Mapping[str, Any]], arithmetic: str, measure: str) -> dict[str, dict[int, float]]:
    """By class of data and K, the errors' ratio."""
    found: dict[str, dict[int, float]] = {}
    for point in sweep:
        if ratio := over(point, arithmetic, measure):
            found.setdefault(point["data"], {})[point["k"]] = ratio
    return found


def _figure(sweep: Sequence[Mapping[str, Any]], arithmetic: str, where: str) -> Any:
    """All panels of one arithmetic."""
    rows = -(-len(PANELS) // _COLUMNS)
    figure, grid = plots.pyplot().subplots(
        rows, _COLUMNS, figsize=(10.5, 3.1 * rows + 0.6), layout="constrained", sharex=True, sharey=True
    )
    found = {measure: lines(sweep, arithmetic, measure) for measure in _STYLES}
    for axes, (name, beginnings) in zip(grid.flat, PANELS.items(), strict=True):
        _panel(axes, [data for data in BY_NAME if data.startswith(beginnings)], found)
        axes.set_title(name, fontsize=10, loc="left")
        for k in CHOSEN[arithmetic]:
            axes.axvline(k, color=plots.GREY, linewidth=1.2, linestyle=":")
    _scales(grid.flat[0], [ratio for of in found.values() for line in of.values() for ratio in line.values()])
    ours, other = _TITLES[arithmetic], _TITLES[BASELINE[arithmetic]]
    figure.supxlabel("K, length of the sums", fontsize=10)
    figure.supylabel(f"error of {ours} / error of {other}", fontsize=10)
    bounds = " to ".join(map(str, CHOSEN[arithmetic])) + " on" * (len(CHOSEN[arithmetic]) == 1)
    what = f"Error of {ours} over that of {other}: largest error solid, rms error dashed. "
    what += f"Below 1 {ours} is more accurate"
    text = f"{what}\nDotted: the planner takes {ours} from K = {bounds}. {where}"
    figure.suptitle(text, fontsize=10, x=0.01, ha="left")
    return figure


def _panel(axes: Any, alike: Sequence[str], found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """The lines of classes that are alike, a colour for each."""
    for colour, data in zip(_COLOURS, alike, strict=False):
        for measure, style in _STYLES.items():
            line = found[measure].get(data, {})
            label = BY_NAME[data].title.replace("+-", "±") if style == "-" else None
            axes.plot(list(line), list(line.values()), style, color=colour, linewidth=1.3, label=label)
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.legend(fontsize=7, loc="upper right")
    axes.grid(alpha=0.3)


def _scales(axes: Any, ratios: Sequence[float]) -> None:
    """Logarithmic; ticks at powers of two, or of ten where these would be too many."""
    ticker: Any = importlib.import_module("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.LogLocator(base=8))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_yscale("log")
    if max(ratios) / min(ratios) < _MOST_FOR_TWO:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
