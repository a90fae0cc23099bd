"""Ratios are of programs timed in turn, and are left out where a time is missing; checked by hand."""

from __future__ import annotations

import pytest

from benchmarks.cases import Case, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.harness.records import (
    EAGER,
    MM,
    OURS,
    PLAIN,
    Accuracy,
    CaseResult,
    Group,
    Measurement,
    Timing,
    not_run,
)

CASE = Case(problems()[0], Shape(2, 3, 4), Setting("fp32", "high"))
TIMES = {OURS: 2.0, PLAIN: 4.0, EAGER: 4.0, MM: 1.0, "cutlass": 0.9, "compile": 3.0}


def result(times: dict[str, float]) -> CaseResult:
    found = CaseResult.of(CASE)
    of = [Measurement(name, name, in_turn=Timing.of([ms])) for name, ms in times.items()]
    found.groups.append(Group("main", of))
    return found


@pytest.mark.parametrize(
    ("others", "own", "expected", "best"),
    [
        ((EAGER,), OURS, 2.0, EAGER),
        ((), OURS, 1.5, "compile"),
        ((MM, "copy"), OURS, 0.5, MM),
        ((EAGER,), PLAIN, 1.0, EAGER),
        (("quack",), OURS, None, ""),
        ((EAGER,), "builtin", None, EAGER),
    ],
)
def test_a_ratio(others: tuple[str, ...], own: str, expected: float | None, best: str) -> None:
    found = result(TIMES)
    assert (found.ratio(others, own), found.best(others)) == (expected, best)
    assert CaseResult.of(CASE).ratio() is None


def test_a_wrong_or_missing_result_of_ours_fails_the_case() -> None:
    found = result(TIMES)
    assert not found.failure()
    by_name = found.measurements
    by_name[EAGER].accuracy["uniform"] = Accuracy.wrong("off")
    assert not found.failure() and by_name[EAGER].why_wrong == "off"
    by_name[OURS].accuracy["signed"] = Accuracy(False, 3, 2.5, 1.0, 4)
    assert found.failure() == "epigemm: 3 elements, 2.5 of the bound"
    by_name[OURS].error = "RuntimeError: no"
    assert found.failure() == "epigemm: RuntimeError: no"


def test_baselines_without_a_time_are_named_with_the_reason() -> None:
    found = result({OURS: 1.0, EAGER: 2.0})
    found.skipped |= {PLAIN: "needs a GPU", "max_autotune": "not run: no time"}
    found.groups[0].measurements += [
        Measurement("quack", "QuACK", error="ImportError: any"),
        Measurement("compile", "torch.compile", accuracy={"uniform": Accuracy.wrong("any")}),
    ]
    assert not_run([found]) == {
        "max_autotune": {"not run: no time": [found.case]},
        "quack": {"ImportError: any": [found.case]},
        "compile": {"further from float64 than its bound: not timed": [found.case]},
    }
