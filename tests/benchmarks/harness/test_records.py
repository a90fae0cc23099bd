"""Quotients are taken within a group, figures left out where a time is missing; by hand."""

from __future__ import annotations

import math

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
    Ratio,
    Timing,
    geomean,
    ratios,
)

CASE = Case(problems()[0], Shape(2, 3, 4), Setting("fp32", "high"))


def result(*groups: dict[str, tuple[float, float]]) -> CaseResult:
    """Of times in turn and alone."""
    found = CaseResult.of(CASE)
    for times in groups:
        found.groups.append(
            Group(
                "any",
                [
                    Measurement(name, name, in_turn=Timing.of([turn]), alone=Timing.of([alone]))
                    for name, (turn, alone) in times.items()
                ],
            )
        )
    return found


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio("of one", (EAGER,)), (2.0, EAGER)),
        (Ratio("alone", (EAGER,), alone=True), (4.0, EAGER)),
        (Ratio("of all", ()), (1.5, "compile")),
        (Ratio("of the bare product", (MM,)), (0.5, MM)),
        (Ratio("of another call of ours", (EAGER,), own=PLAIN), (1.0, EAGER)),
        (Ratio("in its dtype", (EAGER,), dtypes=("fp32",)), (2.0, EAGER)),
        (Ratio("in another dtype", (EAGER,), dtypes=("bf16",)), None),
        (Ratio("of nobody", ("quack",)), None),
    ],
    ids=lambda value: value.key if isinstance(value, Ratio) else "",
)
def test_a_ratio(ratio: Ratio, expected: tuple[float, str] | None) -> None:
    """In the first group that has both."""
    found = result(
        {OURS: (2.0, 1.0), PLAIN: (4.0, 4.0), EAGER: (4.0, 4.0), MM: (1.0, 1.0)},
        {OURS: (4.0, 4.0), EAGER: (4.0, 4.0), "compile": (6.0, 6.0)},
    )
    assert ratio.best(found) == expected
    assert ratios(found, [ratio]) == ({ratio.key: expected[0]} if expected else {})


def test_times_are_of_the_first_group() -> None:
    found = result({OURS: (2.0, 1.0)}, {OURS: (4.0, 4.0), EAGER: (5.0, 5.0)})
    assert found.times() == {OURS: 2.0, EAGER: 5.0} and found.times(alone=True)[OURS] == 1.0
    assert (found.size, found.dtype, found.precision) == ("2x3x4", "fp32", "high")


def test_quartiles() -> None:
    timing = Timing.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (timing.min_ms, timing.q1_ms, timing.median_ms, timing.q3_ms, timing.samples) == (1, 2, 3, 4, 5)


def test_a_wrong_or_missing_result_of_ours_fails_the_case() -> None:
    found = result({OURS: (1.0, 1.0), EAGER: (1.0, 1.0)})
    assert not found.failed()
    ours, eager = found.groups[0].measurements
    eager.accuracy["uniform"] = Accuracy.wrong("off")
    assert not found.failed() and eager.why_wrong == "off"
    ours.accuracy["signed"] = Accuracy(False, 3, 2.5, 1.0, 1.0, 1.0, 4)
    assert found.failed() == [ours] and ours.why_wrong == "3 elements, 2.5 of the bound"
    ours.accuracy, ours.error = {}, "RuntimeError: no"
    assert found.failed() == [ours] and ours.why_wrong == "RuntimeError: no"


def test_the_geometric_mean() -> None:
    assert geomean([]) is None and geomean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isclose(geomean([3.0]) or 0.0, 3.0)
