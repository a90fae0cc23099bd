"""What ``--grid`` does: measure, keep a record for each problem and arithmetic, write tables and figures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, plots, report
from benchmarks.cases import Case
from benchmarks.grid import figures, tables
from benchmarks.grid.plans import PlanGrid, PlanPoint
from benchmarks.grid.runner import GridRunner
from benchmarks.records import CaseResult

_WRITE_EVERY_S = 10.0
_SHOWN_POINTS = 300


def measure(
    runner: GridRunner, cases: Sequence[Case], run: report.Run, folder: Path | None
) -> list[dict[str, Any]]:
    """Measure all cases; ``run`` takes the results, and ``folder`` the JSON as far as it has come."""
    run.ceilings = runner.ceilings([case.setting for case in cases])
    floor = {name: dataclasses.asdict(timing) for name, timing in runner.floor().items()}
    written = time.monotonic()
    for _, result in runner.sweep(cases):
        if not any(result is known for known in run.results):
            run.results.append(result)
        if folder and time.monotonic() - written > _WRITE_EVERY_S:
            _write_json(_records(run, floor, runner.left_out, cases), folder)
            written = time.monotonic()
    run.complete = True
    return _records(run, floor, runner.left_out, cases)


def _key(case: Case) -> tuple[str, ...]:
    return case.problem.name, str(case.setting)


def _records(
    run: report.Run, floor: Mapping[str, Any], left_out: Mapping[str, str], cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """One record for each problem and arithmetic that has a result."""
    by_name: dict[str, CaseResult] = {result.case: result for result in run.results}
    records = []
    for key in dict.fromkeys(map(_key, cases)):
        names = [case.name for case in cases if _key(case) == key]
        part = dataclasses.replace(run, results=[by_name[name] for name in names if name in by_name])
        missing = {name: left_out[name] for name in names if name in left_out}
        if part.results or missing:
            record = report.to_record(part)
            records.append({**record, "grid": {"floor": floor, "left_out": missing, "of": list(key)}})
    return [tables.with_summary(record) for record in records]


def _name(record: Mapping[str, Any]) -> str:
    problem, arithmetic = record["grid"]["of"]
    return plots.slug(problem.partition("/")[2], arithmetic)


def _write_json(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    paths = [folder / f"sweep-{_name(record)}.json" for record in records]
    for record, path in zip(records, paths, strict=True):
        report.write_json(record, path)
    return paths


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """JSON, a table of all points and two figures for each record, and one summary of them all."""
    written = _write_json(records, folder)
    where = environment.headline(records[0]["environment"])
    for record in records:
        name = _name(record)
        written.append(folder / f"sweep-{name}.md")
        tables.write_markdown([record], where, written[-1])
        written += figures.write_figures(record, folder, name)
    if len(records) > 1:
        written.append(folder / "sweep.md")
        tables.write_markdown(records, where, written[-1])
    return written


def measure_plans(
    sweep: PlanGrid, cases: Sequence[Case], run: report.Run, folder: Path | None
) -> list[PlanPoint]:
    """Measure every plan at every point; ``folder`` takes ``plans.json`` as far as it has come."""
    found: list[PlanPoint] = []
    written, wait_s = time.monotonic(), _WRITE_EVERY_S
    for point in sweep.sweep(cases):
        found.append(point)
        if folder and (began := time.monotonic()) - written > wait_s:
            _write_plans(run, found, sweep.left_out, folder)
            # Thousands of points take seconds to write, a tenth of the time at most.
            written = time.monotonic()
            wait_s = max(_WRITE_EVERY_S, 9 * (written - began))
    run.complete = True
    if folder:
        _write_plans(run, found, sweep.left_out, folder)
    return found


def _write_plans(
    run: report.Run, found: Sequence[PlanPoint], left_out: Mapping[str, str], folder: Path
) -> None:
    record = report.to_record(run) | {"left_out": dict(left_out)}
    record["plan_points"] = report.finite([dataclasses.asdict(point) for point in found])
    report.write_json(record, folder / "plans.json")


def show_plans(console: report.Console, points: Sequence[PlanPoint], left_out: Mapping[str, str]) -> None:
    """One line for each point: the fastest plan, and how it compares with what was measured beside it.

    Of many points only their number, and what is wrong.
    """
    names = list(dict.fromkeys(other.name for point in points for other in point.others))
    rows = []
    for point in points:
        best = next((plan for plan in point.plans if plan.ok), None)
        if best is None:
            console.line(report.plain(f"{_size(point)}: no plan: {point.error or point.why_not}"))
            continue
        others = {other.name: f"{other.us / best.us:.3f}" for other in point.others}
        cells = (f"{best.us:.4g}", f"{best.name} {best.plan}", *(others.get(name, "") for name in names))
        rows.append([_size(point), *cells, str(len(point.plans)), str(len(point.refused))])
        for plan in (plan for plan in point.plans if not plan.ok):
            console.line(report.plain(f"{_size(point)}: WRONG: {plan.name} {plan.plan}"))
    columns = ("point", "us", "best plan", *(f"vs {name}" for name in names), "plans", "refused")
    if len(rows) > _SHOWN_POINTS:
        console.line(f"{sum(len(point.plans) for point in points)} plans at {len(points)} points")
    else:
        console.table("Plans", columns, ([report.plain(cell) for cell in row] for row in rows))
    for why in dict.fromkeys(left_out.values()):
        console.line(report.plain(f"{list(left_out.values()).count(why)} points: {why}"))


def _size(point: PlanPoint) -> str:
    return f"{point.problem} {point.m}x{point.n}x{point.k} {point.arithmetic}"


def show(console: report.Console, records: Sequence[Mapping[str, Any]]) -> None:
    """The summary, what failed, and how much was left out."""
    if not records:
        console.line("nothing was measured")
        return
    console.line(report.plain(tables.header(records[0], "Grid")))
    table = tables.summary_table(records)
    console.table(table.title, table.columns, table.rows)
    for record in records:
        for case in record["cases"]:
            for m in (m for group in case["groups"] for m in group["measurements"] if not m["ok"]):
                worst = max((a["fraction_of_bound"] or 0.0 for a in m["accuracy"].values()), default=0.0)
                why = m["error"] or f"WRONG: {worst:.3g} of its bound"
                console.line(report.plain(f"{case['case']}: {m['alternative']}: {why}"))
        for why in dict.fromkeys(record["grid"]["left_out"].values()):
            count = sum(reason == why for reason in record["grid"]["left_out"].values())
            console.line(report.plain(f"{', '.join(record['grid']['of'])}: {count} points: {why}"))
        skipped = [
            (name, why)
            for case in record["cases"]
            for name, why in case["skipped"].items()
            if why.startswith("left out")
        ]
        for name, why in dict.fromkeys(skipped):
            count = skipped.count((name, why))
            console.line(report.plain(f"{', '.join(record['grid']['of'])}: {name}: {count} points: {why}"))
