"""Plots of a record: how many times faster than eager, ratios at random shapes, errors over K."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import EAGER, OURS, PLAIN

INSTALL = "pip install epigemm[bench]"
_COLUMNS = 4
# Alternatives in the order of legends: colour and title.
_STYLES = {
    OURS: ("#d1495b", "epigemm"),
    PLAIN: ("#e69aa4", "epigemm, weight split per call"),
    "mm": ("#30638e", "torch.mm alone"),
    "copy": ("#30638e", "copy x to out"),
    "compile": ("#edae49", "torch.compile"),
    "max_autotune": ("#b5651d", "torch.compile max-autotune"),
    "addmm_activation": ("#3c8d5a", "torch._addmm_activation"),
    "quack": ("#00798c", "QuACK, tuned"),
}


def pyplot() -> Any:
    """Pyplot with the backend that draws files.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        raise SystemExit(f"the benchmarks need matplotlib for plots: {INSTALL}") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def device_line(about: Mapping[str, Any]) -> str:
    """The machine and torch's version, for titles."""
    gpu, cpu = about["gpu"], about["cpu"]
    return f"{gpu['name'] if gpu else cpu['name']}, torch {about['torch']}"


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot().close(figure)
    return path


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "_" for c in text.lower()).replace("__", "_")


def _over_eager(case: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster than eager each alternative is, in turn, by the first group that has it."""
    found: dict[str, float] = {}
    for group in case["groups"]:
        ms = {m["alternative"]: m["in_turn"]["median_ms"] for m in group["measurements"] if m["in_turn"]}
        if EAGER in ms:
            found |= {name: ms[EAGER] / own for name, own in ms.items() if name not in found}
    return found


def _bars(cases: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """A group of horizontal bars for each case, a bar for each alternative."""
    values = [_over_eager(case) for case in cases]
    names = [name for name in _STYLES if any(name in each for each in values)]
    count = sum(len(each) - 1 for each in values)
    size = (9.5, 1.4 + 0.27 * count + 0.3 * len(cases))
    figure, axes = pyplot().subplots(figsize=size, layout="constrained")
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    position, ticks, labels = 0.0, [], []
    for case, each in zip(cases, values, strict=True):
        present = [name for name in names if name in each]
        ticks.append(position + (len(present) - 1) / 2)
        labels.append(f"{case['problem'].split('/', 1)[1]}\n{'x'.join(map(str, case['shape']))}")
        for name in present:
            places[name].append((position, each[name]))
            position += 1
        position += 1.1
    for name, pairs in places.items():
        colour, label = _STYLES[name]
        bars = axes.barh(*zip(*pairs, strict=True), 0.86, color=colour, label=label, zorder=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4)
    axes.axvline(1.0, color="#6c757d", linewidth=1.2, zorder=3)
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.margins(x=0.12, y=0.015)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than eager PyTorch (line at 1)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return _save(figure, path)


def _scatter(cases: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """How many times faster than eager at each shape, over the product's size."""
    figure, axes = pyplot().subplots(figsize=(8, 4.4), layout="constrained")
    for name in (OURS, PLAIN):
        points = [(case["flops"], ratio) for case in cases if (ratio := _over_eager(case).get(name))]
        if points:
            colour, label = _STYLES[name]
            axes.scatter(*zip(*points, strict=True), s=9, color=colour, label=label)
    axes.axhline(1.0, color="#6c757d", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xlabel("2 M N K")
    axes.set_ylabel("times faster than eager PyTorch")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(fontsize=8)
    return _save(figure, path)


def panels(lines: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str, path: Path) -> Path:
    """A small plot for each entry, both axes logarithmic, its lines by label; the line at 1 is drawn."""
    rows = -(-len(lines) // _COLUMNS)
    size = (14, 2.6 * rows + 0.8)
    figure, grid = pyplot().subplots(
        rows, _COLUMNS, figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    for axes, (name, by_label) in zip(grid.flat, lines.items(), strict=False):
        for (label, points), style in zip(by_label.items(), (OURS, "mm"), strict=False):
            if points:
                colour = _STYLES[style][0]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=label)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.tick_params(labelbottom=True, labelsize=8)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(lines) :]:
        axes.set_axis_off()
    grid.flat[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    return _save(figure, path)


def write_plots(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what a record has data for: of a random one a point for each shape, of others bars."""
    is_random = record["kind"] == "random"
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in record["cases"]:
        if {OURS, PLAIN} & set(_over_eager(case)):
            arithmetic = "_".join(filter(None, (case["dtype"], case["precision"])))
            what = case["problem"] if is_random else case["problem"].partition("/")[0]
            found.setdefault(f"{what}-{arithmetic}", []).append(case)
    draw, name = (_scatter, "random") if is_random else (_bars, "speedup")
    line = device_line(record["environment"])
    return [
        draw(cases, f"{what}\n{line}", folder / f"{name}-{_slug(what)}.png") for what, cases in found.items()
    ]
