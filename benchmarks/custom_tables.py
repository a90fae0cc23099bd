"""What ``--custom`` has measured: records -> the figures of summary.json -> tables, and what misses its mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.custom_cases import SIZES, case_name
from benchmarks.records import BASELINES, BUILTIN, OURS, CaseResult
from benchmarks.report import best_peer
from benchmarks.tables import Table

Measured = tuple[Case, CaseResult]
FIGURES = (
    "fp32_vs_best",
    "bf16_vs_bare",
    "bf16_vs_best",
    "fp32_vs_builtin",
    "bf16_vs_builtin",
)
MOST_FIRST_S = {"bf16": 1.5, "fp32": 2.5}
MOST_CACHED_MS = 50.0
_LEAST_FP32, _LEAST_BF16, _LEAST_OF_BUILTIN = 4.0, 1.0, 0.99
_DIGITS = 4


def _ratios(result: CaseResult) -> dict[str, float]:
    """Times of others over ours: of the best rival, of the built-in, in bf16 of the bare product."""
    if not result.groups:
        return {}
    found: dict[str, float | None] = {}
    group = result.groups[0]
    ours, best = group.find(OURS), best_peer(result)
    found["vs_best"] = best[0] if best else None
    if ours is not None:
        found["vs_builtin"] = group.ratio(ours, BUILTIN)
        found["vs_bare"] = group.ratio(ours, *BASELINES) if result.dtype != "fp32" else None
    return {f"{result.dtype}_{key}": round(x, _DIGITS) for key, x in found.items() if x is not None}


def figures(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """The ratios of every case that has any, both dtypes together."""
    found: dict[str, dict[str, float]] = {}
    for case, result in measured:
        if ratios := _ratios(result):
            found.setdefault(case_name(case), {}).update(ratios)
    return {name: {key: ratios[key] for key in FIGURES if key in ratios} for name, ratios in found.items()}


def _by_dtype(values: Sequence[tuple[Case, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for case, value in values:
        if value:
            found.setdefault(case_name(case), {})[case.setting.dtype_name] = value
    return found


def best(measured: Sequence[Measured]) -> dict[str, dict[str, str]]:
    """The best rival's name, by case and dtype."""
    names = ((case, best_peer(result)) for case, result in measured)
    return _by_dtype([(case, found[1].alternative if found else "") for case, found in names])


def times(measured: Sequence[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """Median milliseconds by case, dtype and alternative."""
    return _by_dtype(
        [
            (
                case,
                {
                    m.alternative: round(m.in_turn.median_ms, 5)
                    for _, m in result.rows
                    if m.in_turn is not None
                },
            )
            for case, result in measured
        ]
    )


def not_run(measured: Sequence[Measured]) -> dict[str, dict[str, list[str]]]:
    """By rival and reason, the cases without its time."""
    found: dict[str, dict[str, list[str]]] = {}
    for case, result in measured:
        reasons = {name: why.replace("left out:", "not run:") for name, why in result.skipped.items()}
        for _, m in result.rows:
            if m.error:
                reasons[m.alternative] = m.error
            elif m.wrong:
                reasons[m.alternative] = "further from float64 than its bound: not timed"
        for name, why in reasons.items():
            if name != BUILTIN or why.startswith("not run:"):
                label = f"{case_name(case)} {case.setting.dtype_name}"
                found.setdefault(name, {}).setdefault(why, []).append(label)
    return found


def case_table(summary: Mapping[str, Any]) -> Table:
    """One line per case."""
    rows = [
        [
            name,
            *(f"{ratios[key]:.3f}" if key in ratios else "-" for key in FIGURES),
            ", ".join(f"{dtype}: {rival}" for dtype, rival in summary["best"].get(name, {}).items()),
        ]
        for name, ratios in summary["cases"].items()
    ]
    return Table("Times of others over ours (above 1: ours is faster)", ("case", *FIGURES, "best"), rows)


def call_table(summary: Mapping[str, Any]) -> Table:
    """The first calls."""
    rows = [
        [dtype, f"{seconds:.3f}", f"{summary['cached_call_ms'][dtype]:.1f}"]
        for dtype, seconds in summary["first_call_s"].items()
    ]
    return Table(
        "The first call of a process", ("dtype", "nothing cached, s", "from the disk cache, ms"), rows
    )


def missed(summary: Mapping[str, Any]) -> list[str]:
    """Figures that miss what is wanted of them."""
    found: list[str] = []
    large = tuple(f"/{shape}" for shape in SIZES[:2])
    for name, ratios in summary["cases"].items():
        least = {
            "fp32_vs_best": _LEAST_FP32 if name.endswith(large) else 1.0,
            "bf16_vs_best": _LEAST_BF16,
            "fp32_vs_builtin": _LEAST_OF_BUILTIN,
            "bf16_vs_builtin": _LEAST_OF_BUILTIN,
        }
        for key, bar in least.items():
            if key in ratios and ratios[key] < bar:
                found.append(f"{name}: {key} is {ratios[key]:.3f}, wanted {bar:g}")
    for dtype, seconds in summary["first_call_s"].items():
        if seconds > MOST_FIRST_S[dtype]:
            found.append(f"first call, {dtype}: {seconds:.2f} s, wanted {MOST_FIRST_S[dtype]:g}")
        if summary["cached_call_ms"][dtype] > MOST_CACHED_MS:
            ms = summary["cached_call_ms"][dtype]
            found.append(f"first call from the cache, {dtype}: {ms:.1f} ms, wanted {MOST_CACHED_MS:g}")
    return found


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """What was not run, and why."""
    found = [f"{name}: not run: {why}" for name, why in summary["absent"].items()]
    for name, reasons in summary["not_run"].items():
        found += [f"{name}: {why} ({len(cases)} cases)" for why, cases in reasons.items()]
    return found


def markdown(summary: Mapping[str, Any], headline: str, method: str) -> str:
    """The summary for people."""
    text = [f"# {headline}", "", f"`{summary['command']}`", "", method, ""]
    text += [case_table(summary).markdown(), call_table(summary).markdown()]
    if summary["gpu"]:
        text += [f"- missed: {line}" for line in missed(summary)]
    text += [f"- {line}" for line in remarks(summary)]
    return "\n".join(text) + "\n"
