"""What all figures have in common: colours, titles, one way to write them. The figure of ``make bench``."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CUSTOM, ELEMENTWISE, GLU, LINEAR
from benchmarks.harness.records import BUILTIN, EAGER, OURS, PLAIN, CaseResult

INSTALL = "pip install epigemm[bench]"
GREY = "#6c757d"
# Alternatives in the order of legends: colour and title.
STYLES = {
    OURS: ("#d1495b", "epigemm"),
    PLAIN: ("#e69aa4", "epigemm, weight split per call"),
    BUILTIN: ("#9d2f3c", "epigemm's built-in"),
    "mm": ("#30638e", "torch.mm alone"),
    "copy": ("#30638e", "copy x to out"),
    "compile": ("#edae49", "torch.compile"),
    "max_autotune": ("#b5651d", "torch.compile max-autotune"),
    "addmm_activation": ("#3c8d5a", "torch._addmm_activation"),
    "quack": ("#00798c", "QuACK, tuned"),
    EAGER: ("#8d99ae", "eager PyTorch"),
}
Draw = Callable[[Sequence[CaseResult], Mapping[str, Any], Path], list[Path]]
"""Draws cases, of an environment, into files of a folder."""
_DPI, _COLOURS = 110, 192
_KINDS = {
    LINEAR: "Linear layers",
    ELEMENTWISE: "Elementwise functions",
    CUSTOM: "Epilogues in Python",
    GLU: "Gated pairs of products",
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


def _arithmetic(dtype: str, precision: str) -> str:
    """A type, and of fp32 the precision, for titles."""
    return f"{dtype} at precision {precision}" if precision else dtype


def file_name(*parts: str) -> str:
    """Of a figure, by what it shows: ``random-linear_bias_relu-fp32_high.png``."""
    return "-".join(part.lower().replace("/", "_") for part in parts) + ".png"


# --- files -------------------------------------------------------------------------------------------------------


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, with few colours to be small."""
    image: Any = importlib.import_module("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, bbox_inches="tight")
    pyplot().close(figure)
    with image.open(drawn) as opened:
        few = opened.convert("RGB").quantize(_COLOURS, dither=image.Dither.NONE)
    few.save(path, optimize=True)
    return path


# --- bars --------------------------------------------------------------------------------------------------------


def speedups(cases: Sequence[CaseResult], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """How many times faster than eager each alternative is: a file for each kind of function and arithmetic."""
    found: dict[tuple[str, str, str], list[CaseResult]] = {}
    for case in cases:
        if {OURS, PLAIN} & set(_over_eager(case)):
            kind = case.problem.partition("/")[0]
            found.setdefault((kind, case.dtype, case.precision), []).append(case)
    written = []
    for (kind, *of), chosen in found.items():
        figure = _bars(chosen, f"{_KINDS[kind]} in {_arithmetic(*of)}\n{device_line(about)}")
        written.append(save(figure, folder / file_name("speedup", kind, "_".join(filter(None, of)))))
    return written


def _over_eager(case: CaseResult) -> dict[str, float]:
    """How many times faster than eager each alternative is."""
    ms = case.times()
    return {name: ms[EAGER] / own for name, own in ms.items() if name != EAGER} if EAGER in ms else {}


def _label(case: CaseResult) -> str:
    training = ", training" * case.problem.endswith(":train")
    sizes = " x ".join(map(str, case.shape))
    return f"{case.formula}{training}\n{sizes}"


def _bars(cases: Sequence[CaseResult], title: str) -> Any:
    """A group of horizontal bars for each case, a bar for each alternative."""
    values = [_over_eager(case) for case in cases]
    names = [name for name in STYLES if any(name in each for each in values)]
    count = sum(len(each) for each in values)
    size = (7.6, 1.4 + 0.19 * count + 0.2 * len(cases))
    figure, axes = pyplot().subplots(figsize=size, layout="constrained")
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    position, ticks = 0.0, []
    for each in values:
        present = [name for name in names if name in each]
        ticks.append(position + (len(present) - 1) / 2)
        for name in present:
            places[name].append((position, each[name]))
            position += 1
        position += 1.1
    for name, pairs in places.items():
        colour, label = STYLES[name]
        bars = axes.barh(*zip(*pairs, strict=True), 0.86, color=colour, label=label, zorder=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4)
    axes.axvline(1.0, color=GREY, linewidth=1.2, zorder=3)
    axes.set_yticks(ticks, list(map(_label, cases)), fontsize=9)
    axes.margins(x=0.1, y=0.015)
    axes.invert_yaxis()
    axes.set_xlabel("time of eager PyTorch / time of the alternative")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
