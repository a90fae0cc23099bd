"""A record of whole models as tables and plots; made from the JSON, so that they can be made again without the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plots
from benchmarks.harness.environment import headline
from benchmarks.harness.records import EAGER
from benchmarks.harness.report import Table, arithmetic
from benchmarks.models.records import (
    BACKEND,
    COMPILED,
    FUSED,
    FUSED_GRAPH,
    FUSED_WITH_PACKS,
    GRAPH,
    TITLES,
    UNFUSED,
)
from benchmarks.models.runner import COMPILING, MAIN

_Case = Mapping[str, Any]


def found(case: _Case, group: str) -> dict[str, Mapping[str, Any]]:
    """The measurements of a group by alternative."""
    return {m["alternative"]: m for g in case["groups"] if g["name"] == group for m in g["measurements"]}


def _ms(measured: Mapping[str, Any], name: str, key: str = "wall") -> str:
    timing = measured.get(name, {}).get(key)
    return f"{timing['median_ms']:.4g}" if timing else ""


def ratio(measured: Mapping[str, Any], name: str, base: str) -> float | None:
    """How many times faster than another alternative: the median over turns."""
    value = measured.get(name, {}).get("times_faster", {}).get(base)
    return float(value["median"]) if value else None


def _ratio(measured: Mapping[str, Any], name: str, base: str) -> str:
    value = ratio(measured, name, base)
    if value is None:
        return ""
    slower = measured[name]["slower"] and UNFUSED[name] == base
    return f"{value:.2f}" + (" SLOWER" if slower else "")


def _device_ratio(measured: Mapping[str, Any]) -> str:
    eager, fused = (measured.get(name, {}).get("device") for name in (EAGER, FUSED))
    return f"{eager['median_ms'] / fused['median_ms']:.2f}" if eager and fused else ""


def _sites(measured: Mapping[str, Any], name: str) -> str:
    sites = measured.get(name, {}).get("sites", {})
    return ", ".join(f"{count} {function}" for function, count in sites.items()) or "0"


def _as_they_were(measured: Mapping[str, Any]) -> str:
    unfused = measured.get(FUSED, {}).get("unfused", {})
    return "; ".join(f"{count}: {reason}" for reason, count in unfused.items())


def _error(measured: Mapping[str, Any], name: str) -> str:
    m = measured.get(name, {})
    if m.get("error"):
        return str(m["error"])
    numbers = ", ".join(f"{e['norm']:.2g}" for e in m.get("errors", {}).values() if e["norm"] is not None)
    return f"WRONG: {m['wrong']}" if m.get("wrong") else numbers


def _eager_table(cases: Sequence[_Case], what: str) -> Table:
    columns = ["model", "batch", "eager ms", "fuse ms", "times faster", "packs kept: ms", "times faster"]
    columns += ["device: eager ms", "fuse ms", "times faster", "graph ms", "fuse, graph ms", "times faster"]
    columns += ["sites", "ran as they were"]
    rows = []
    for case in cases:
        measured = found(case, MAIN)
        graphs = [_ms(measured, GRAPH), _ms(measured, FUSED_GRAPH), _ratio(measured, FUSED_GRAPH, GRAPH)]
        rows.append(
            [
                case["model"],
                str(case["batch"]),
                *(_ms(measured, name) for name in (EAGER, FUSED)),
                _ratio(measured, FUSED, EAGER),
                _ms(measured, FUSED_WITH_PACKS),
                _ratio(measured, FUSED_WITH_PACKS, EAGER),
                *(_ms(measured, name, "device") for name in (EAGER, FUSED)),
                _device_ratio(measured),
                *graphs,
                _sites(measured, FUSED),
                _as_they_were(measured),
            ]
        )
    return Table(f"Eager, {what}", tuple(columns), rows)


def _compiled_table(cases: Sequence[_Case], what: str) -> Table | None:
    ours = (BACKEND,)
    columns = ["model", "batch", "eager ms", "fuse ms", "compile ms", "fuse, compile ms", "backend ms"]
    columns += ["compile vs eager", "fuse, compile vs compile", "backend vs compile", "backend vs eager"]
    columns += ["sites of the backend", "seconds to compile: plain", "backend"]
    rows = []
    for case in cases:
        measured = found(case, COMPILING)
        if not measured:
            continue
        rows.append(
            [
                case["model"],
                str(case["batch"]),
                *(_ms(measured, name) for name in (EAGER, FUSED, COMPILED, *ours)),
                _ratio(measured, COMPILED, EAGER),
                *(_ratio(measured, name, COMPILED) for name in ours),
                _ratio(measured, BACKEND, EAGER),
                _sites(measured, BACKEND),
                *(_seconds(measured, name) for name in (COMPILED, BACKEND)),
            ]
        )
    return Table(f"Compiled, {what}", tuple(columns), rows) if rows else None


def _seconds(measured: Mapping[str, Any], name: str) -> str:
    value = measured.get(name, {}).get("prepare_s")
    return "" if value is None else f"{value:.1f}"


def _error_table(cases: Sequence[_Case], what: str) -> Table:
    names = [name for name in TITLES if any(_everything(case).get(name) for case in cases)]
    rows = [
        [case["model"], str(case["batch"]), *(_error(_everything(case), name) for name in names)]
        for case in cases
    ]
    title = f"Error against float64 (norm of the output's; of all gradients'), {what}"
    return Table(title, ("model", "batch", *(TITLES[name] for name in names)), rows)


def _everything(case: _Case) -> dict[str, Mapping[str, Any]]:
    return found(case, COMPILING) | found(case, MAIN)


def compared(record: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Case and alternative of ours -> its measurement, wherever there is one of the same without fusion beside it.

    What was measured in both groups is taken from the first.
    """
    return {
        (case["case"], name): m
        for case in record["cases"]
        for group in (COMPILING, MAIN)
        for name, m in found(case, group).items()
        if UNFUSED.get(name) in m["times_faster"]
    }


def slower(record: Mapping[str, Any]) -> Table:
    """Where one of our alternatives is slower than the same without fusion: the promise is that this is empty."""
    rows = [
        [case, TITLES[name], TITLES[UNFUSED[name]], f"{m['times_faster'][UNFUSED[name]]['median']:.3f}"]
        for (case, name), m in compared(record).items()
        if m["slower"]
    ]
    columns = ("point", "alternative", "slower than", "times faster")
    return Table("Slower than without fusion", columns, rows)


def _kinds(record: Mapping[str, Any]) -> Iterator[tuple[str, list[_Case]]]:
    """The cases of each mode and arithmetic."""
    kinds = dict.fromkeys((case["mode"], arithmetic(case)) for case in record["cases"])
    for mode, kind in kinds:
        cases = [c for c in record["cases"] if (c["mode"], arithmetic(c)) == (mode, kind)]
        yield f"{mode}, {kind}", cases


def tables(record: Mapping[str, Any]) -> list[Table]:
    """All tables."""
    every: list[Table | None] = [slower(record)]
    for what, cases in _kinds(record):
        every += [_eager_table(cases, what), _compiled_table(cases, what)]
    every += [_error_table(cases, what) for what, cases in _kinds(record)]
    return [table for table in every if table is not None]


def remarks(record: Mapping[str, Any]) -> list[str]:
    """What was not measured, and why."""
    lines = [f"{name}: {reason}" for name, reason in record["absent"].items()]
    for reason in dict.fromkeys(record["left_out"].values()):
        names = [name for name, why in record["left_out"].items() if why == reason]
        lines.append(f"{len(names)} points {reason}: {', '.join(names)}")
    skipped = [(name, why, case["case"]) for case in record["cases"] for name, why in case["skipped"].items()]
    for name, why in dict.fromkeys((name, why) for name, why, _ in skipped):
        names = [case for *what, case in skipped if what == [name, why]]
        lines.append(f"{TITLES[name]} {why}: {', '.join(names)}")
    return lines


def markdown(record: Mapping[str, Any]) -> str:
    """The record for people."""
    head = [f"# {headline(record['environment'])}", "", record["method"], ""]
    head += [*(f"- {remark}" for remark in remarks(record)), ""]
    return "\n".join(head + [table.markdown() for table in tables(record)])


def write_plots(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """For each mode and arithmetic: how many times faster than eager each alternative is.

    Raises:
        SystemExit: matplotlib is not installed; names the extra that installs it.
    """
    plt = plots.pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for what, cases in _kinds(record):
        rows = [(f"{case['model']}, batch {case['batch']}", _over_eager(case)) for case in cases]
        rows = [(label, values) for label, values in rows if values]
        if rows:
            path = folder / f"models-{plots.slug(*what.split(', '))}.png"
            title = f"whole models, {what}\n{plots.device_line(record)}"
            written.append(plots.ratio_bars(plt, rows, title, path))
    return written


def _over_eager(case: _Case) -> dict[str, float]:
    """Each alternative's ratio to eager in its own group; what was measured with the compiled ones is taken there."""
    by_name: dict[str, float] = {}
    for group in (MAIN, COMPILING):
        measured = found(case, group)
        for name in measured:
            value = ratio(measured, name, EAGER)
            if value is not None:
                by_name[name] = value
    return by_name


def write(record: Mapping[str, Any], *, text: Path | None, folder: Path | None) -> list[Path]:
    """Markdown to a file and plots to a folder, where they are wanted."""
    written: list[Path] = []
    if text:
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(markdown(record))
        written.append(text)
    return written + (write_plots(record, folder) if folder else [])
