"""Plots of a record: how many times faster than eager, the rate beside the bare product, ratios at random shapes.

They are made from the JSON record, so that they can be drawn again later without the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import BARE, EAGER, OURS, PLAIN

INSTALL = "pip install epigemm[bench]"
_COLUMNS = 4
_COLOURS = {
    OURS: "#d1495b",
    PLAIN: "#e69aa4",
    EAGER: "#6c757d",
    "mm": "#30638e",
    "copy": "#30638e",
    "compile": "#edae49",
    "max_autotune": "#b5651d",
    "addmm_activation": "#3c8d5a",
    "nvmath": "#7a5195",
    "quack": "#00798c",
    "triton_tf32x3": "#9c9a3c",
    "fuse": "#d1495b",
    "backend": "#8f2d56",
    "fuse_graph": "#c77dba",
    "graph": "#adb5bd",
}
_TITLES = {
    PLAIN: "epigemm, weight split per call",
    "mm": "torch.mm alone",
    "copy": "copy x to out",
    "compile": "torch.compile",
    "max_autotune": "torch.compile max-autotune",
    "addmm_activation": "torch._addmm_activation",
    "nvmath": "cuBLASLt autotuned",
    "quack": "QuACK, tuned",
    "triton_tf32x3": "Triton tf32x3",
    "fuse": "epigemm.fuse",
    "backend": 'torch.compile(backend="epigemm")',
    "fuse_graph": "CUDA graph of epigemm.fuse",
    "graph": "CUDA graph",
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


def device_line(record: Mapping[str, Any]) -> str:
    """The machine and torch's version, for titles."""
    environment = record["environment"]
    gpu, cpu = environment["gpu"], environment["cpu"]
    name = gpu["name"] if gpu else f"{cpu['name']}, {cpu['threads']} threads"
    return f"{name}, torch {environment['torch']}"


def in_order(alternatives: set[str]) -> list[str]:
    """Alternatives as legends list them."""
    known = [name for name in _COLOURS if name in alternatives]
    return known + sorted(alternatives - set(known))


def save(plt: Any, figure: Any, path: Path) -> Path:
    """Write a figure and let go of it."""
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
    return path


def slug(*parts: str) -> str:
    """Words as a file's name."""
    text = "-".join(parts).lower()
    return "".join(c if c.isalnum() or c == "-" else "_" for c in text).replace("__", "_").strip("_")


def ratio_bars(
    plt: Any, rows: Sequence[tuple[str, Mapping[str, float | None]]], title: str, path: Path
) -> Path:
    """Horizontal bars in groups: a label, and how many times faster than eager each alternative is."""
    names = in_order(set().union(*(values for _, values in rows)) - {EAGER})
    count = sum(len(set(values) - {EAGER}) for _, values in rows)
    figure, axes = plt.subplots(figsize=(9.5, 1.4 + 0.27 * count + 0.3 * len(rows)), layout="constrained")
    position, ticks, labelled, widest = 0.0, [], set(), 1.0
    for _, values in rows:
        present = [name for name in names if name in values]
        ticks.append(position + (len(present) - 1) / 2)
        for name in present:
            value = values[name]
            if value is None:
                position += 1
                continue
            widest = max(widest, value)
            label = None if name in labelled else _TITLES.get(name, name)
            labelled.add(name)
            axes.barh(position, value, 0.86, color=_COLOURS.get(name, "#444444"), label=label, zorder=2)
            axes.annotate(
                f"{value:.2f}", (value, position), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
            position += 1
        position += 1.1
    axes.axvline(1.0, color=_COLOURS[EAGER], linewidth=1.2, zorder=3)
    axes.set_yticks(ticks, [label for label, _ in rows], fontsize=9)
    axes.margins(y=0.015)
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.12)
    axes.set_xlabel("times faster than eager PyTorch (line at 1)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return save(plt, figure, path)


def _over_eager(case: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster than eager each alternative is, in turn, by the first group that has it."""
    found: dict[str, float] = {}
    for group in case["groups"]:
        ms = {m["alternative"]: m["in_turn"]["median_ms"] for m in group["measurements"] if m["in_turn"]}
        if EAGER in ms:
            found |= {name: ms[EAGER] / own for name, own in ms.items() if name not in found}
    return found


def _label(case: Mapping[str, Any]) -> str:
    name = case["problem"].split("/", 1)[1].replace("_", " ").replace(":", ", ")
    return f"{name}\n{'x'.join(map(str, case['shape']))}"


def _kinds(record: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The cases with times, by kind of problem and arithmetic."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in record["cases"]:
        if OURS in _over_eager(case):
            arithmetic = " ".join(filter(None, (case["dtype"], case["precision"])))
            found.setdefault((case["problem"].partition("/")[0], arithmetic), []).append(case)
    return found


def _rates(plt: Any, cases: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """Throughput per case, ours beside eager and the bare product or copy."""
    figure, axes = plt.subplots(figsize=(2.4 + 1.5 * len(cases), 5.0), layout="constrained")
    names = [name for name in (OURS, EAGER, *BARE) if any(name in _over_eager(case) for case in cases)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(cases))]
        values = [_rate(case, name) for case in cases]
        bars = axes.bar(places, values, width * 0.94, color=_COLOURS[name], label=_TITLES.get(name, name))
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(cases)), [_label(case).replace(" ", "\n") for case in cases], fontsize=8)
    axes.set_ylabel("TFLOP/s" if cases[0]["flops"] else "GB/s")
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(y=0.12)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return save(plt, figure, path)


def _rate(case: Mapping[str, Any], name: str) -> float:
    for group in case["groups"]:
        for m in group["measurements"]:
            if m["alternative"] == name and m["in_turn"]:
                ms = m["in_turn"]["median_ms"]
                return float(case["flops"] / ms / 1e9 if case["flops"] else case["bytes"] / ms / 1e6)
    return 0.0


def _scatter(plt: Any, cases: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """How many times faster than eager at each shape, over the product's size."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for name in (OURS, PLAIN):
        points = [(case["flops"], ratio) for case in cases if (ratio := _over_eager(case).get(name))]
        if points:
            axes.scatter(*zip(*points, strict=True), s=9, color=_COLOURS[name], label=_TITLES.get(name, name))
    axes.axhline(1.0, color=_COLOURS[EAGER], linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xlabel("2 M N K")
    axes.set_ylabel("times faster than eager PyTorch")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(fontsize=8)
    return save(plt, figure, path)


def panels(lines: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str, path: Path) -> Path:
    """A small plot for each entry, both axes logarithmic, its lines by label; the line at 1 is drawn."""
    plt = pyplot()
    rows = -(-len(lines) // _COLUMNS)
    figure, grid = plt.subplots(
        rows, _COLUMNS, figsize=(14, 2.6 * rows + 0.8), layout="constrained", sharex=True, squeeze=False
    )
    for axes, (name, by_label) in zip(grid.flat, lines.items(), strict=False):
        for (label, points), colour in zip(by_label.items(), (_COLOURS[OURS], _COLOURS["mm"]), strict=False):
            if points:
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
    return save(plt, figure, path)


def write_plots(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what a record has data for: of a random one a point for each shape, of others bars.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for (kind, arithmetic), cases in _kinds(record).items():
        title = f"{kind}, {arithmetic}\n{device_line(record)}"
        if record["kind"] == "random":
            for problem in dict.fromkeys(case["problem"] for case in cases):
                of = [case for case in cases if case["problem"] == problem]
                path = folder / f"random-{slug(problem, arithmetic)}.png"
                written.append(_scatter(plt, of, f"{problem}, {title.partition(', ')[2]}", path))
            continue
        rows = [(_label(case), _over_eager(case)) for case in cases]
        written.append(ratio_bars(plt, rows, title, folder / f"speedup-{slug(kind, arithmetic)}.png"))
        written.append(_rates(plt, cases, title, folder / f"rate-{slug(kind, arithmetic)}.png"))
    return written
