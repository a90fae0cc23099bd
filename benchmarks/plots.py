"""Plots of a record: speedup bars per case, and throughput over size with the measured ceilings drawn in.

They are made from the JSON record, so that they can be drawn again later without the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import BAR_EFFICIENCY, BASELINES, EAGER, OURS, PLAIN, YARDSTICKS
from benchmarks.report import INSTALL
from benchmarks.tables import arithmetic as _arithmetic
from benchmarks.tables import sweeps_over_m

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


def line_style(name: str, *, dots: bool = False) -> dict[str, Any]:
    """How an alternative's line looks over a size: ours stands out. ``dots``: too few points for a line."""
    ours = name == OURS
    if dots:
        return line_style(name) | {"linestyle": "none", "marker": "D", "markersize": 6}
    return {
        "color": _COLOURS.get(name, "#444444"),
        "label": _TITLES.get(name, name),
        "marker": "o",
        "markersize": 4,
        "linewidth": 2.2 if ours else 1.3,
        "zorder": 3 if ours else 2,
    }


def pyplot() -> Any:
    """Pyplot with the backend that draws files.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        raise SystemExit(f"benchmarks needs matplotlib for plots: {INSTALL}") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _kind(case: Mapping[str, Any]) -> str:
    return "linear" if len(case["shape"]) == 3 else "elementwise"


def _shape(case: Mapping[str, Any]) -> str:
    return "x".join(map(str, case["shape"]))


def _measured(case: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Alternative -> its in-turn record, each once; without the yardsticks, which compute something else."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in case["groups"]:
        for m in group["measurements"]:
            if m["in_turn"] and m["alternative"] not in YARDSTICKS:
                found.setdefault(m["alternative"], m["in_turn"])
    return found


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


def _speedup_bars(plt: Any, record: Mapping[str, Any], arithmetic: str, kind: str, path: Path) -> Path | None:
    """Horizontal bars, one group per case: how many times faster than eager each alternative is."""
    rows = [
        (_case_label(case), {name: m.get("times_faster_than_eager") for name, m in measured.items()})
        for case in record["cases"]
        if _arithmetic(case) == arithmetic and _kind(case) == kind
        if {EAGER, OURS} <= (measured := _measured(case)).keys()
    ]
    title = f"{kind}, {arithmetic}\n{device_line(record)}"
    return ratio_bars(plt, rows, title, path) if rows else None


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


def _case_label(case: Mapping[str, Any]) -> str:
    name = case["problem"].split("/", 1)[1].replace("_", " ").replace(":", ", ")
    return f"{name}\n{_shape(case)}"


def _ceiling(record: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[float, str] | None:
    """The measured limit of a case, and its label: for products on fp16 pieces, fp16's rate over their number."""
    products = case.get("fp16_products") or 0
    name = "copy" if _kind(case) == "elementwise" else "fp16" if products else _arithmetic(case)
    found = next((c for c in record["ceilings"] if c["name"] == name), None)
    if found is None:
        return None
    value = found["value"] / max(products, 1)
    return value, f"{value:.4g} {found['unit']}" + (f" (fp16 / {products})" if products > 1 else "")


def _roof(ceiling: float, copy: float, case: Mapping[str, Any]) -> float:
    """TFLOP/s that neither the measured product nor the measured copy bandwidth allows to exceed."""
    return float(min(ceiling, copy * case["flops"] / case["bytes"] / 1e3))


def _throughput_over_m(
    plt: Any, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], path: Path
) -> Path:
    """TFLOP/s against M for one problem, N, K and arithmetic."""
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    for name in in_order(set().union(*(_measured(case) for case in cases))):
        points = [(c["shape"][0], _measured(c)[name]["throughput"]) for c in cases if name in _measured(c)]
        axes.plot(*zip(*points, strict=True), **line_style(name))
    _draw_roof(axes, record, cases)
    _m_axis(axes, cases)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TFLOP/s")
    _sweep_title(axes, record, cases)
    return save(plt, figure, path)


def _draw_roof(axes: Any, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    ceiling = _ceiling(record, cases[0])
    copy = next((c for c in record["ceilings"] if c["name"] == "copy"), None)
    if ceiling is None or copy is None:
        return
    value, label = ceiling
    roof = [_roof(value, copy["value"], case) for case in cases]
    axes.plot(
        [case["shape"][0] for case in cases],
        roof,
        color="black",
        linestyle="--",
        linewidth=1.1,
        label=f"measured ceilings:\n{label}, {copy['value']:.4g} GB/s",
    )


def _throughput_bars(
    plt: Any, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], path: Path
) -> Path:
    """Throughput per case, ours beside eager and the bare product, the measured ceiling as a line."""
    unit = next(iter(_measured(cases[0]).values()))["unit"]
    figure, axes = plt.subplots(figsize=(2.4 + 1.5 * len(cases), 5.0), layout="constrained")
    names = (OURS, EAGER, *(b for b in BASELINES if any(b in _measured(c) for c in cases)))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(cases))]
        values = [_measured(case).get(name, {}).get("throughput") or 0.0 for case in cases]
        bars = axes.bar(
            places, values, width * 0.94, color=_COLOURS[name], label=_TITLES.get(name, name), zorder=2
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    ceiling = _ceiling(record, cases[0])
    if ceiling is not None:
        value, label = ceiling
        axes.axhline(value, color="black", linestyle="--", linewidth=1.1, label=f"measured ceiling: {label}")
    axes.set_xticks(range(len(cases)), [_case_label(case).replace(" ", "\n") for case in cases], fontsize=8)
    axes.set_ylabel(unit)
    title = f"{_kind(cases[0])}, {_arithmetic(cases[0])}\n{device_line(record)}"
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3, zorder=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return save(plt, figure, path)


def _speedup_over_m(
    plt: Any, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], path: Path
) -> Path:
    """How many times faster than eager each alternative is, against M; the line at 1 must not be crossed."""
    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    key = "times_faster_than_eager"
    for name in in_order(set().union(*(_measured(case) for case in cases)) - {EAGER}):
        points = [
            (c["shape"][0], m[name][key]) for c in cases if name in (m := _measured(c)) and m[name][key]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **line_style(name))
    axes.axhline(1.0, color=_COLOURS[EAGER], linewidth=1.2)
    _m_axis(axes, cases)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than eager PyTorch")
    _sweep_title(axes, record, cases)
    return save(plt, figure, path)


def _ceiling_bars(plt: Any, record: Mapping[str, Any], path: Path) -> Path | None:
    """How much of its own ceiling each fp32 call reaches: the fp16 products and one pass over x, then all else."""
    cases = [c for c in record["cases"] if _measured(c).get(OURS, {}).get("times_bar")]
    if not cases:
        return None
    figure, axes = plt.subplots(figsize=(9.5, 1.4 + 0.42 * len(cases)), layout="constrained")
    reached = [BAR_EFFICIENCY / _measured(case)[OURS]["times_bar"] for case in cases]
    bars = axes.barh(range(len(cases)), reached, 0.7, color=_COLOURS[OURS], zorder=2)
    axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=3)
    axes.axvline(BAR_EFFICIENCY, color="black", linestyle="--", linewidth=1.1, zorder=3)
    axes.set_yticks(range(len(cases)), [case["case"] for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.1, *(1.1 * value for value in reached)))
    axes.set_xlabel(
        f"(fp16 products + one pass over x) / epigemm's time, in turn; the line is at {BAR_EFFICIENCY}"
    )
    axes.set_title(f"fp32 on fp16 pieces\n{device_line(record)}", fontsize=11, loc="left")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    return save(plt, figure, path)


def _m_axis(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    rows_axis(axes, [case["shape"][0] for case in cases])


def rows_axis(axes: Any, sizes: Sequence[int]) -> None:
    """M in powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8, rotation=45 if len(sizes) > 8 else 0)
    axes.minorticks_off()
    axes.set_xlabel("M (rows of x)")


def _sweep_title(axes: Any, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    _, n, k = cases[0]["shape"]
    title = f"{cases[0]['problem']}, {_arithmetic(cases[0])}, N = {n}, K = {k}\n{device_line(record)}"
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)


def level_lines(axes: Any, *levels: float) -> None:
    """Horizontal lines: the first is the one not to fall below."""
    for index, level in enumerate(levels):
        axes.axhline(level, color=_COLOURS[EAGER], linewidth=1.2, linestyle=":" if index else "-", zorder=1)


def panels(plt: Any, count: int, title: str) -> tuple[Any, list[Any], Any]:
    """A figure of ``count`` small plots in rows of four, and a place for the legend after the last."""
    columns = min(4, count + 1)
    rows = -(-(count + 1) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.7 * rows), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    cells = list(grid.flat)
    for cell in cells[count:]:
        cell.set_axis_off()
    for cell in cells[:count]:
        cell.grid(alpha=0.3)
    return figure, cells[:count], cells[count]


def slug(*parts: str) -> str:
    """Words as a file's name."""
    text = "-".join(parts).lower()
    return "".join(c if c.isalnum() or c == "-" else "_" for c in text).replace("__", "_").strip("_")


def write_plots(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every plot that a record has data for.

    Returns:
        The files written.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    timed = [case for case in record["cases"] if _measured(case)]
    sweeps = sweeps_over_m(timed)
    for cases in sweeps:
        _, n, k = cases[0]["shape"]
        name = slug(cases[0]["problem"], _arithmetic(cases[0]), f"n{n}", f"k{k}") + ".png"
        written.append(_throughput_over_m(plt, record, cases, folder / f"throughput-{name}"))
        if all(EAGER in _measured(case) for case in cases):
            written.append(_speedup_over_m(plt, record, cases, folder / f"speedup-{name}"))
    ceilings = _ceiling_bars(plt, record, folder / "ceiling-fp32.png")
    written += [ceilings] if ceilings else []
    swept = {id(case) for cases in sweeps for case in cases}
    for kind, arithmetic in dict.fromkeys((_kind(case), _arithmetic(case)) for case in timed):
        bars = _speedup_bars(
            plt, record, arithmetic, kind, folder / (slug("speedup", kind, arithmetic) + ".png")
        )
        written += [bars] if bars else []
        chosen = [c for c in timed if (_kind(c), _arithmetic(c)) == (kind, arithmetic) and id(c) not in swept]
        if chosen:
            name = slug("throughput", kind, arithmetic) + ".png"
            written.append(_throughput_bars(plt, record, chosen, folder / name))
    return written
