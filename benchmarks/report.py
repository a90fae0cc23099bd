"""Records -> JSON, CSV and what the console shows."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.records import (
    BASELINES,
    EAGER,
    MAX_AUTOTUNE,
    NOT_PEERS,
    OURS,
    OWN,
    YARDSTICKS,
    CaseResult,
    Ceiling,
    Group,
    Measurement,
    PlanSweep,
    Timing,
)
from benchmarks.runner import throughput

SCHEMA = 1
INSTALL = "pip install epigemm[bench]"


@dataclass
class Run:
    """A whole run: where, how, and what came out."""

    environment: dict[str, Any]
    effort: dict[str, Any]
    absent_peers: dict[str, str] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    complete: bool = False

    @property
    def failed(self) -> bool:
        """Whether one of our own results is wrong or missing."""
        return any(result.failed() for result in self.results)


def finite(value: Any) -> Any:
    """Plain data that JSON can hold: JSON knows no NaN and no infinity: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def _measurement_record(result: CaseResult, group: Group, measurement: Measurement) -> dict[str, Any]:
    record = dataclasses.asdict(measurement)
    record["ok"] = not measurement.wrong and not measurement.error
    for key, timing in (("in_turn", measurement.in_turn), ("alone", measurement.alone)):
        if timing is None or measurement.alternative in YARDSTICKS:
            continue
        alone = key == "alone"
        value, unit = throughput(result, timing.median_ms)
        record[key] |= {
            "throughput": value,
            "unit": unit,
            "times_faster_than_eager": group.ratio(measurement, EAGER, alone=alone),
            "times_faster_than_baseline": group.ratio(measurement, *BASELINES, alone=alone),
            "times_faster_than_max_autotune": group.ratio(measurement, MAX_AUTOTUNE, alone=alone),
        }
        if measurement.alternative in OWN:
            record[key]["times_bar"] = group.times_bar(measurement, result.fp16_products, alone=alone)
    return record


def to_record(run: Run) -> dict[str, Any]:
    """The whole run as plain JSON data."""
    cases = []
    for result in run.results:
        record = dataclasses.asdict(result)
        record["groups"] = [
            {
                "name": g.name,
                "bar_ms": {
                    "in_turn": g.bar(result.fp16_products),
                    "alone": g.bar(result.fp16_products, alone=True),
                },
                "measurements": [_measurement_record(result, g, m) for m in g.measurements],
            }
            for g in result.groups
        ]
        cases.append(record)
    record = {
        "schema": SCHEMA,
        "complete": run.complete,
        "environment": run.environment,
        "effort": run.effort,
        "absent_peers": run.absent_peers,
        "ceilings": [dataclasses.asdict(ceiling) for ceiling in run.ceilings],
        "cases": cases,
    }
    plain_data: dict[str, Any] = finite(record)
    return plain_data


def with_plans(record: Mapping[str, Any], sweeps: Sequence[PlanSweep], *, complete: bool) -> dict[str, Any]:
    """The record of a run that swept plans."""
    return {**record, "complete": complete, "plans": finite([dataclasses.asdict(sweep) for sweep in sweeps])}


def write_json(record: Mapping[str, Any], path: Path) -> None:
    """Write by replacing, so that a run that is killed leaves its last complete record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


_CSV_COLUMNS = (
    "case",
    "problem",
    "models",
    "dtype",
    "precision",
    "shape",
    "group",
    "alternative",
    "in_turn_ms",
    "in_turn_iqr_ms",
    "alone_ms",
    "alone_iqr_ms",
    "throughput",
    "unit",
    "vs_eager",
    "vs_baseline",
    "alone_vs_eager",
    "alone_vs_baseline",
    "vs_max_autotune",
    "alone_vs_max_autotune",
    "times_bar",
    "alone_times_bar",
    "peak_bytes",
    "kept_bytes",
    "host_us",
    "fraction_of_bound",
    "relative_error",
    "ok",
    "error",
)


def _csv_row(case: Mapping[str, Any], group: str, m: Mapping[str, Any]) -> dict[str, Any]:
    turn, alone = m["in_turn"] or {}, m["alone"] or {}
    checks, memory = m["accuracy"].values(), m.get("memory") or {}

    def worst(key: str) -> Any:
        return max((a[key] for a in checks if a[key] is not None), default="")

    def iqr(timing: Mapping[str, Any]) -> Any:
        return timing["q3_ms"] - timing["q1_ms"] if timing else ""

    return {
        "case": case["case"],
        "problem": case["problem"],
        "models": " ".join(case["models"]),
        "dtype": case["dtype"],
        "precision": case["precision"],
        "shape": "x".join(map(str, case["shape"])),
        "group": group,
        "alternative": m["alternative"],
        "in_turn_ms": turn.get("median_ms", ""),
        "in_turn_iqr_ms": iqr(turn),
        "alone_ms": alone.get("median_ms", ""),
        "alone_iqr_ms": iqr(alone),
        "throughput": turn.get("throughput", ""),
        "unit": turn.get("unit", ""),
        "vs_eager": turn.get("times_faster_than_eager", ""),
        "vs_baseline": turn.get("times_faster_than_baseline", ""),
        "alone_vs_eager": alone.get("times_faster_than_eager", ""),
        "alone_vs_baseline": alone.get("times_faster_than_baseline", ""),
        "vs_max_autotune": turn.get("times_faster_than_max_autotune", ""),
        "alone_vs_max_autotune": alone.get("times_faster_than_max_autotune", ""),
        "times_bar": turn.get("times_bar", ""),
        "alone_times_bar": alone.get("times_bar", ""),
        "peak_bytes": memory.get("peak", ""),
        "kept_bytes": memory.get("kept", ""),
        "host_us": m["host_us"],
        "fraction_of_bound": worst("fraction_of_bound"),
        "relative_error": worst("relative_error"),
        "ok": m["ok"],
        "error": m["error"],
    }


def write_csv(record: Mapping[str, Any], path: Path) -> None:
    """One line per measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _CSV_COLUMNS)
        writer.writeheader()
        for case in record["cases"]:
            for group in case["groups"]:
                writer.writerows(_csv_row(case, group["name"], m) for m in group["measurements"])


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ms(timing: Timing | None) -> str:
    return "" if timing is None else f"{timing.median_ms:.4g}"


def _spread(timing: Timing | None) -> str:
    return "" if timing is None else f"{100 * timing.spread:.1f}%"


def _check(measurement: Measurement) -> str:
    if measurement.error:
        return f"[red]{plain(measurement.error)}[/]"
    if not measurement.accuracy:
        return "-"
    worst = max(measurement.accuracy.values(), key=lambda a: a.fraction_of_bound)
    if measurement.wrong:
        problem = worst.problem or f"{worst.wrong_elements} elements, {worst.fraction_of_bound:.3g} of bound"
        return f"[bold red]WRONG: {plain(problem)}[/]"
    return f"ok, {worst.fraction_of_bound:.2f}"


def plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", "\\[")


def _plan_text(plan: Mapping[str, Any]) -> str:
    if not plan:
        return ""
    if plan.get("fused"):
        parts = (plan.get(key) for key in ("arithmetic", "tile", "cluster", "schedule", "raster", "swizzle"))
        return "fused " + " ".join(str(part) for part in parts if part is not None)
    return f"gemm + elementwise: {plan.get('why_not', '')}"


class Console:
    """Tables on standard output.

    Raises:
        SystemExit: rich is not installed; names the extra that installs it.
    """

    def __init__(self) -> None:
        try:
            import rich.box
            import rich.console
            import rich.table
        except ImportError:
            raise SystemExit(f"benchmarks needs rich for its tables: {INSTALL}") from None
        self._table_type, self._box = rich.table.Table, rich.box.SIMPLE_HEAD
        # A pipe has no width of its own, and 80 columns would fold every table.
        self._console = rich.console.Console()
        if not self._console.is_terminal:
            self._console = rich.console.Console(width=180, color_system=None)

    def line(self, text: str = "") -> None:
        """One line of text, with rich's markup."""
        self._console.print(text, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Any table: first column left, the others right."""
        table = self._table_type(
            title=title, title_justify="left", title_style="bold", pad_edge=False, box=self._box
        )
        for index, column in enumerate(columns):
            left = index == 0
            table.add_column(column, justify="left" if left else "right", no_wrap=left, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def group(self, result: CaseResult, group: Group) -> None:
        """One line per alternative of one group."""
        unit = "TFLOP/s" if result.flops else "GB/s"
        base = "torch.mm" if result.flops else "copy"
        columns = ["alternative", "in turn\nms", "\nIQR", "alone\nms", "\nIQR", f"in turn\n{unit}"]
        columns += [f"{when}\nvs {what}" for when in ("in turn", "alone") for what in ("eager", base)]
        columns += (
            [f"{when}\n/ bar" for when in ("in turn", "alone")] if group.bar(result.fp16_products) else []
        )
        columns += ["host\nus", "error\nof bound"]
        models = f" (problem {', '.join(result.models)})" if result.models else ""
        self.line()
        self.table(
            f"{plain(result.case)}{models}",
            columns,
            (self._row(result, group, m) for m in group.measurements),
        )
        if result.plan and group is result.groups[0]:
            self.line(f"  plan: {plain(_plan_text(result.plan))}")
            if _plan_text(result.plan_plain) != _plan_text(result.plan):
                self.line(f"  plan, weight split per call: {plain(_plan_text(result.plan_plain))}")

    def _row(self, result: CaseResult, group: Group, m: Measurement) -> list[str]:
        yardstick = m.alternative in YARDSTICKS
        ratios = (group.ratio(m, *to, alone=a) for a in (False, True) for to in ((EAGER,), BASELINES))
        products = result.fp16_products
        bars = (
            group.times_bar(m, products, alone=a) if m.alternative in OWN else None for a in (False, True)
        )
        title = f"[bold]{plain(m.title)}[/]" if m.alternative == OURS else plain(m.title)
        return [
            title,
            _ms(m.in_turn),
            _spread(m.in_turn),
            _ms(m.alone),
            _spread(m.alone),
            f"{throughput(result, m.in_turn.median_ms)[0]:.4g}" if m.in_turn and not yardstick else "",
            *("" if yardstick else _ratio(ratio) for ratio in ratios),
            *([_ratio(bar) for bar in bars] if group.bar(products) else []),
            f"{m.host_us:.0f}" if math.isfinite(m.host_us) else "",
            _check(m),
        ]

    def summary(self, run: Run) -> None:
        """One line per case: ours against eager, the bare product and the best of the peers. Printed last."""
        for table in tables.fp32_tables(to_record(run)):
            self.line()
            self.table(plain(table.title), table.columns, ([plain(c) for c in row] for row in table.rows))
        columns = ["case", "in turn\nms", "\nTFLOP/s", "\nGB/s"]
        columns += [f"{when}\nvs {what}" for when in ("in turn", "alone") for what in ("eager", "bare")]
        columns += ["eager\nvs bare", "vs best\npeer", "best\npeer", "path", "check"]
        self.line()
        title = "Summary: times faster than (above 1: epigemm is faster); bare = torch.mm alone, or a copy"
        self.table(title, columns, (_summary_row(result) for result in run.results))
        for ceiling in run.ceilings:
            self.line(f"measured ceiling: {ceiling.name} {ceiling.value:.4g} {ceiling.unit}")
        for name, reason in run.absent_peers.items():
            self.line(f"absent: {name}: {plain(reason)}")
        left_out = {
            (n, why) for r in run.results for n, why in r.skipped.items() if why.startswith("left out")
        }
        for name, reason in sorted(left_out):
            count = sum(r.skipped.get(name) == reason for r in run.results)
            self.line(f"{name}: {plain(reason)} ({count} cases)")
        wrong = [(r.case, m) for r in run.results for m in r.failed()]
        for case, m in wrong:
            self.line(f"[bold red]FAILED[/]: {plain(case)}: {_check(m)}")
        others = sum(m.wrong for r in run.results for _, m in r.rows if m.alternative not in OWN)
        if others:
            self.line(
                f"[yellow]{others} results of other alternatives left their bound and were not timed[/]"
            )
        verdict = (
            f"[bold red]{len(wrong)} failed[/]" if wrong else "every result of ours lies within its bound"
        )
        self.line(f"{len(run.results)} cases; {verdict}")


def best_peer(result: CaseResult) -> tuple[float, Measurement] | None:
    """The alternative (not the bare product) closest to ours, and how many times faster ours is."""
    found: list[tuple[float, Measurement]] = []
    for group in result.groups:
        ours = group.find(OURS)
        for m in group.measurements:
            if ours is None or m.in_turn is None or m.alternative in NOT_PEERS:
                continue
            ratio = group.ratio(ours, m.alternative)
            if ratio is not None:
                found.append((ratio, m))
    return min(found, key=lambda pair: pair[0]) if found else None


def _summary_row(result: CaseResult) -> list[str]:
    group = result.groups[0] if result.groups else Group("")
    ours, eager, best = group.find(OURS), group.find(EAGER), best_peer(result)
    path = "" if not result.plan else "fused" if result.plan.get("fused") else "second"
    failed = result.failed()
    check = "[bold red]FAILED[/]" if failed else "ok" if ours else "not run"
    if ours is None or ours.in_turn is None:
        return [plain(result.case), *[""] * 10, path, check]
    rate, unit = throughput(result, ours.in_turn.median_ms)
    gigabytes = result.bytes / ours.in_turn.median_ms / 1e6
    return [
        plain(result.case),
        _ms(ours.in_turn),
        f"{rate:.4g}" if unit == "TFLOP/s" else "",
        f"{gigabytes:.4g}",
        _ratio(group.ratio(ours, EAGER)),
        _ratio(group.ratio(ours, *BASELINES)),
        _ratio(group.ratio(ours, EAGER, alone=True)),
        _ratio(group.ratio(ours, *BASELINES, alone=True)),
        _ratio(group.ratio(eager, *BASELINES)) if eager else "",
        _ratio(best[0]) if best else "",
        best[1].alternative if best else "",
        path,
        check,
    ]
