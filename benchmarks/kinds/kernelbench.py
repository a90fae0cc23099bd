"""KernelBench: a checkout's problems, as they are, in eager, torch.compile, ``epigemm.fuse`` and the backend.

Each problem runs in a process of its own, through the suite's harness: its seeds, fp32, modules in training mode, five
trials against eager within 1e-4. What is ours and does not pass is right if its error against float64 is at most 1.5
times that of the same without epigemm; what is wrong is not timed. A problem that does not pass against itself in eager
is timed, and held against nothing. The four ways take turns, a row of calls each, the host included, the L2 cache as it
is; times are medians, a ratio is the median of the ratios of all turns. "fuse" runs operator by operator, without a
compiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import matching
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Table, number
from benchmarks.kinds import Run, models
from benchmarks.models import figures as found
from benchmarks.models.kernelbench import PAIRS, Problem, prepare, problems, tree_hashes
from benchmarks.models.worker import EAGER

METHOD = " ".join(str(__doc__).split("\n\n")[1].split())
RATIOS = tuple(pair.ratio for pair in PAIRS)


def add(figures: dict[str, Any], problem: Problem, what: str, value: Any) -> None:
    """What became of a problem."""
    if what != "result":
        figures[what][str(problem)] = value
        return
    case = dict(value)
    turns = case.pop("turns_ms")
    case |= {f"{way}_ms": statistics.median(times) for way, times in turns.items()}
    for pair in PAIRS:
        if pair.other in turns and pair.own in turns:
            found.add_ratio(case, pair, turns)
    figures["cases"][str(problem)] = case


def judged(figures: Mapping[str, Any], *, quick: bool = False) -> dict[str, Any]:
    """Ratios by level, of problems with a product that epigemm takes and of the others; what is wrong."""
    cases = figures["cases"]
    groups: dict[str, dict[str, list[float]]] = {}
    for name, case in cases.items():
        group = f"{name.split('/')[0]}, {'products taken' if case['products'] else 'nothing taken'}"
        for ratio in RATIOS:
            if ratio in case:
                groups.setdefault(group, {}).setdefault(ratio, []).append(case[ratio])
    spreads = {
        group: {
            ratio: {"problems": len(values), "geomean": geomean(values), "worst": min(values)}
            for ratio, values in of.items()
        }
        for group, of in groups.items()
    }
    return {"geomeans": spreads, "wrong": [name for name, case in cases.items() if case["right"] is False]}


def merge(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of several runs' summaries; of what was measured twice the last one counts, or what was wrong.

    Raises:
        ValueError: they are not all of one source and one checkout, on one kind of GPU, measured with one effort.
    """
    found.check_sources(records, "kernelbench")
    if any(each["checkout"] != records[0]["checkout"] for each in records):
        raise ValueError(f"records of different checkouts: {[each['checkout'] for each in records]}")
    figures = found.empty()
    cases = figures["cases"]
    reasons = [figures[name] for name in found.FIGURES[:3]]
    for each in records:
        for name in found.FIGURES[:3]:
            figures[name] |= each[name]
        for name, case in each["cases"].items():
            for why in reasons:
                why.pop(name, None)
            if name not in cases or cases[name]["right"] is not False:
                cases[name] = case
    figures["not_reached"] = {name: why for name, why in figures["not_reached"].items() if name not in cases}
    return {**found.about_all(records), **figures, **judged(figures)}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """All problems, and geometric means."""
    columns = ["problem", "products"]
    for pair in PAIRS:
        columns += [f"{pair.other} ms", pair.ratio, "quartiles"]
    title = "The time of eager over fuse's, of torch.compile over its backend's (above 1: epigemm is faster)"
    rows = [_row(name, case) for name, case in figures["cases"].items()]
    means = [
        [group, ratio, str(spread["problems"]), number(spread["geomean"]), number(spread["worst"])]
        for group, of in figures["geomeans"].items()
        for ratio, spread in of.items()
    ]
    return [
        Table(title, (*columns, "right"), rows),
        Table("Geometric means", ("problems", "ratio", "count", "geomean", "worst"), means),
    ]


def _row(name: str, case: Mapping[str, Any]) -> list[str]:
    row = [name, f"{case['products']} of {case['products_found']}"]
    for pair in PAIRS:
        q1, _, q3 = case.get("quartiles", {}).get(pair.ratio, (None, None, None))
        row += [
            number(case.get(f"{pair.other}_ms")),
            number(case.get(pair.ratio)),
            f"{number(q1)} {number(q3)}",
        ]
    return [*row, {True: "yes", False: "NO", None: ""}[case["right"]]]


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """What did not pass, ours and eager itself, beside the errors against float64; what there is no result of."""
    lines = []
    for name, case in figures["cases"].items():
        whys, errors = case["not_passed"], case["errors"]
        if not any(pair.own in whys for pair in PAIRS) and EAGER not in whys:
            continue
        what = "fails its own harness in eager" if EAGER in whys else "beyond the harness's tolerance"
        against = ", ".join(f"{way} {error:.2g}" for way, error in errors.items())
        lines.append(
            f"{what}: {name}: "
            + "; ".join(f"{way}: {why}" for way, why in whys.items())
            + (f"; errors against float64: {against}" if errors else "")
        )
    return lines + models.without_result(figures)


def _said(figures: Mapping[str, Any], problem: Problem) -> str:
    case = figures["cases"][str(problem)]
    return ", ".join(f"{ratio} {number(case.get(ratio)) or 'none'}" for ratio in RATIOS)


SUITE = models.Suite("kernelbench", METHOD, prepare, add, judged, _said, tables, remarks, merge)


def main(run: Run) -> int:
    """Measure the problems chosen; 1 if a result is wrong or missing.

    Raises:
        ValueError: no such checkout, or a pattern that matches nothing.
    """
    checkout = run.options.kernelbench
    every = {str(problem): problem for problem in problems(checkout)}
    chosen = [every[name] for name in matching(list(every), run.options.cases, "with --kernelbench")]
    return SUITE.measure(run, chosen, {"checkout": tree_hashes(checkout)}, quick=models.is_quick(run))
