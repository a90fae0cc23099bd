"""Outcomes of jobs become figures; records of several runs become one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.models.figures import add, empty, judged, merge
from benchmarks.models.jobs import INFERENCE, TRAINING, Case, Job

LARGE = Case("bert-base", "fp32_highest", INFERENCE, (128, 128))
JOB = Job(LARGE, "eager_options")
GRAPHS = Job(LARGE, "whole")


def result(other: list[float], own: list[float], job: Job = JOB, *, right: bool = True) -> dict[str, Any]:
    names = (job.variant.other, job.variant.own)
    found: dict[str, Any] = {"right": right, "errors": dict.fromkeys(names, 1e-6)}
    if right:
        found["turns_ms"] = dict(zip(names, (other, own), strict=True))
        found |= {"host_ms": dict.fromkeys(names, 0.5), "device_ms": dict.fromkeys(names, own[0])}
        found |= {"chains": {"followed": 4, "taken": 3}, "products": {"all": 5, "fused": 3}}
    return found


def record(*outcomes: tuple[Job, str, Any], **changes: Any) -> dict[str, Any]:
    found = empty()
    for outcome in outcomes:
        add(found, *outcome)
    about = {"kind": "models", "complete": True, "csrc": "a" * 40, "python": "b" * 40, "modified": False}
    about |= {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.13.0", "epigemm": {}}
    about |= {"effort": {"quick": False}, "method": "", "command": "python -m benchmarks", "cpu": "a CPU"}
    return {**about, **found, **judged(found, quick=False), **changes}


def test_medians_and_quartiles_of_the_turns() -> None:
    found = empty()
    add(found, JOB, "result", result([2.0, 4.0, 3.0, 5.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]))
    case = found["cases"][str(LARGE)]
    assert case["eager_options_vs_eager"] == 3.0
    assert case["quartiles"] == {"eager_options_vs_eager": [2.0, 3.0, 4.0]}
    assert case["ms"] == {"eager_options_vs_eager": {"eager": 3.0, "eager_options": 1.0}}
    assert case["chains"] == {"followed": 4, "taken": 3}


def test_what_is_wrong_has_no_time_and_stays_wrong() -> None:
    found = empty()
    add(found, GRAPHS, "result", result([], [], GRAPHS, right=False))
    add(found, JOB, "result", result([2.0], [1.0]))
    assert not found["cases"][str(LARGE)]["right"]
    assert "backend_vs_eager" not in found["cases"][str(LARGE)]
    assert judged(found, quick=False)["wrong"] == [str(LARGE)]


def missed(job: Job, other: list[float], own: list[float]) -> list[str]:
    found = empty()
    add(found, job, "result", result(other, own, job))
    return [text.removeprefix(f"{job.case}: ") for text in judged(found, quick=False)["missed"]]


def test_bars() -> None:
    small = Case("bert-base", "bf16", INFERENCE, (2, 128))
    train = Job(Case("bert-base", "bf16", TRAINING, (128, 128)), "eager_options")
    noisy, low = [0.9, 0.9, 1.0, 1.0, 1.0], [0.97] * 5
    ones = [1.0] * 5
    assert missed(Job(small, "eager_options"), noisy, ones) == []
    assert missed(Job(small, "eager_options"), low, ones) == [
        "eager_options_vs_eager 0.970, upper quartile, wanted 0.98"
    ]
    assert missed(Job(small, "whole"), [0.99], [1.0]) == [
        "backend_vs_eager 0.990, upper quartile, wanted 1.0"
    ]
    assert missed(train, low, ones) == []
    assert missed(train, [0.9], [1.0]) == ["eager_options_vs_eager 0.900, wanted 0.96"]
    assert missed(JOB, [2.0], [1.0]) == []


def test_runs_of_the_same_come_together() -> None:
    first, second = (record((JOB, "result", result(other, [1.0, 1.0]))) for other in ([1.0, 2.0], [3.0, 4.0]))
    given = copy.deepcopy([first, second])
    merged = merge([first, second])
    assert [first, second] == given
    case = merged["cases"][str(LARGE)]
    assert case["turns_ms"]["eager_options_vs_eager"] == {
        "eager": [1.0, 2.0, 3.0, 4.0],
        "eager_options": [1.0] * 4,
    }
    assert case["eager_options_vs_eager"] == 2.5 and case["quartiles"]["eager_options_vs_eager"] == [
        1.75,
        2.5,
        3.25,
    ]
    assert len(merged["runs"]) == 2 and merged["complete"] and "command" not in merged
    assert merged["geomeans"]["fp32_highest/inference/large"]["eager_options_vs_eager"] == pytest.approx(2.5)


def test_parts_and_variants_come_together() -> None:
    parts = [
        record((JOB, "result", result([2.0], [1.0])), (GRAPHS, "not_reached", "no time left")),
        record((GRAPHS, "result", result([3.0], [1.0], GRAPHS))),
    ]
    for order in (parts, parts[::-1]):  # one run may not reach what an earlier one had
        merged = merge(order)
        case = merged["cases"][str(LARGE)]
        assert (case["eager_options_vs_eager"], case["backend_vs_eager"]) == (2.0, 3.0)
        assert merged["not_reached"] == {} and merged["layers"] == {"bert-base": 2}
    # What failed after it had a result is still said.
    again = merge([*parts, record((JOB, "failed", "OutOfMemoryError"))])
    assert again["failed"] == {str(JOB): "OutOfMemoryError"}


def test_what_was_wrong_once_is_wrong() -> None:
    wrong, right = (
        record((JOB, "result", result([1.0], [1.0], right=is_right))) for is_right in (False, True)
    )
    assert merge([wrong, right])["wrong"] == merge([right, wrong])["wrong"] == [str(LARGE)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"csrc": "c" * 40}, "different sources"),
        ({"python": "c" * 40}, "different sources"),
        ({"gpu": "NVIDIA H100"}, "different sources"),
        ({"effort": {"quick": True}}, "different sources"),
        ({"modified": True}, "modified; give --trees"),
        ({"csrc": ""}, "not known"),
        ({"kind": "host"}, "kind 'host'"),
    ],
)
def test_records_of_something_else_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge([record(), record(**changes)])
    merge([record(), record(driver="590", cpu="another")])
