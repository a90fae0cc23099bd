"""What became of jobs -> the figures of a record, its bars, and one record of several runs' records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.records import geomean
from benchmarks.models.jobs import RATIOS, TRAINING, VARIANTS, Case, Job, Variant
from benchmarks.models.registry import NETWORKS

# By ratio: what the upper quartile is to reach at least, in inference; for training, by the median.
_LEAST = {
    "eager_options_vs_eager": 0.98,
    "backend_vs_compile": 0.98,
    "backend_vs_eager": 1.0,
    "overhead_vs_compile": 0.98,
}
_LEAST_TRAINING = 0.96
_DIGITS = 5
FIGURES = ("failed", "skipped", "not_reached", "cases")
# By variant: what else its jobs say of a case.
_OF_VARIANT = {"eager_options": ("chains", "products")}
_OF_A_RUN = ("command", "cpu", "driver", "selection")
_ONE_SOURCE = ("csrc", "python", "gpu", "cuda", "torch", "epigemm", "effort", "method")


def empty() -> dict[str, Any]:
    """Before anything is measured."""
    return {name: {} for name in FIGURES}


def add(figures: dict[str, Any], job: Job, what: str, value: Any) -> None:
    """What became of a job. A result replaces a reason why there was none, and follows the turns of an earlier one."""
    if what != "result":
        figures[what][str(job)] = value
        return
    for name in FIGURES[:3]:
        figures[name].pop(str(job), None)
    case = figures["cases"].setdefault(str(job.case), {"right": True})
    case["right"] = case["right"] and value["right"]
    ratio = job.variant.ratio
    errors = case.setdefault("errors", {}).setdefault(ratio, {})
    errors |= {name: max(error, errors.get(name, 0.0)) for name, error in value["errors"].items()}
    if "turns_ms" not in value:
        return
    turns = case.setdefault("turns_ms", {}).setdefault(ratio, {})
    for name, times in value["turns_ms"].items():
        turns[name] = turns.get(name, []) + [float(f"{ms:.{_DIGITS}g}") for ms in times]
    case.setdefault("ms", {})[ratio] = {name: statistics.median(times) for name, times in turns.items()}
    add_ratio(case, job.variant, turns)
    for name in ("host_ms", "device_ms"):
        # Eager's are those beside the fused graph that runs operator by operator.
        found, kept = value[name], case.setdefault(name, {})
        case[name] = {**kept, **found} if job.name == "eager_options" else {**found, **kept}
    case |= {name: value[name] for name in _OF_VARIANT.get(job.name, ()) if name in value}


def add_ratio(case: dict[str, Any], variant: Variant, turns: Mapping[str, Sequence[float]]) -> None:
    """The quartiles of the ratio of each turn, the median of which is the ratio."""
    ratios = [other / own for other, own in zip(turns[variant.other], turns[variant.own], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    case.setdefault("quartiles", {})[variant.ratio] = quartiles
    case[variant.ratio] = quartiles[1]


def judged(figures: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
    """Geometric means by precision, mode and size of the batch; what is below its bar; what is wrong.

    A quick run has no bars: its batches are too small.
    """
    groups: dict[str, dict[str, list[float]]] = {}
    missed = []
    for name, result in figures["cases"].items():
        case = Case.parse(name)
        group = f"{case.precision}/{case.mode}/{'large' if case.is_large else 'small'}"
        for ratio in RATIOS:
            if ratio in result:
                groups.setdefault(group, {}).setdefault(ratio, []).append(result[ratio])
        missed += [] if quick else [f"{name}: {text}" for text in misses(case, result)]
    geomeans = {
        group: {ratio: geomean(values) for ratio, values in of.items()} for group, of in groups.items()
    }
    wrong = [name for name, result in figures["cases"].items() if not result["right"]]
    return {"geomeans": geomeans, "missed": missed, "wrong": wrong}


def misses(case: Case, result: Mapping[str, Any]) -> list[str]:
    """The bars of a case that it is below."""
    found = []
    for ratio in RATIOS:
        if ratio not in result:
            continue
        is_training = case.mode == TRAINING
        least = _LEAST_TRAINING if is_training else _LEAST[ratio]
        value = result[ratio] if is_training else result["quartiles"][ratio][2]
        if value < least:
            which = "" if is_training else ", upper quartile"
            found.append(f"{ratio} {value:.3f}{which}, wanted {least}")
    return found


def layers(cases: Mapping[str, Any]) -> dict[str, int]:
    """How many layers the networks of these cases have."""
    names = dict.fromkeys(name.split("/")[0] for name in cases)
    return {name: NETWORKS[name].layers for name in names}


def merge(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of the summaries of several runs: of parts of the jobs, of other variants, or of the same again.

    The turns of what was measured more than once come together. Of single figures the last record's count.

    Raises:
        ValueError: they are not all of one source, on one kind of GPU, measured with one effort.
    """
    check_sources(records, "models")
    figures = empty()
    reached = set[str]()
    for each in records:
        for name in FIGURES[:3]:
            figures[name] |= each[name]
        for name, case in each["cases"].items():
            for job in (Job(Case.parse(name), variant) for variant in VARIANTS):
                if job.variant.ratio in case.get("errors", {}):
                    add(figures, job, "result", _result_of(case, job))
                    reached.add(str(job))
    figures["not_reached"] = {job: why for job, why in figures["not_reached"].items() if job not in reached}
    figures |= judged(figures, quick=bool(records[0]["effort"]["quick"]))
    return {**about_all(records), "layers": layers(figures["cases"]), **figures}


def check_sources(records: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Whether records can become one.

    Raises:
        ValueError: they are not all of this kind and of one source, on one kind of GPU, measured with one effort.
    """
    for each in records:
        if each.get("kind") != kind:
            raise ValueError(f"expected records of --{kind}, got one of kind {each.get('kind')!r}")
        if not (each["csrc"] and each["python"]) or each["modified"]:
            raise ValueError("a record of a tree that is not known, or that was modified; give --trees")
        differ = {name for name in _ONE_SOURCE if each[name] != records[0][name]}
        if differ:
            texts = [str({name: record[name] for name in sorted(differ)}) for record in (records[0], each)]
            raise ValueError(f"records of different sources: {texts[0]} and {texts[1]}")


def about_all(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one record of them says besides their figures."""
    first = {name: value for name, value in records[0].items() if name not in _OF_A_RUN}
    runs = [run for each in records for run in each.get("runs") or [_run_of(each)]]
    return {**first, "complete": all(each["complete"] for each in records), "runs": runs}


def _run_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in (*_OF_A_RUN, "complete") if name in record}


def _result_of(case: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """What a job had found, from a record."""
    ratio, names = job.variant.ratio, (job.variant.other, job.variant.own)
    result: dict[str, Any] = {"right": case["right"], "errors": case["errors"][ratio]}
    if ratio in case.get("turns_ms", {}):
        result["turns_ms"] = case["turns_ms"][ratio]
        for which in ("host_ms", "device_ms"):
            result[which] = {name: case[which][name] for name in names if name in case[which]}
    return result | {name: case[name] for name in _OF_VARIANT.get(job.name, ()) if name in case}
