"""Ratios of programs timed in turn, by hand; what is left out where a time is missing; results that are sampled."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from benchmarks.cases import Case, Setting, Shape, custom, make_data
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
from benchmarks.harness.sampling import SampledReference, stratified
from benchmarks.harness.timing import Effort, in_turn, make_timer

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


# --- some rows and columns are checked in place of all: every wrong tile is found -------------------------------------


CPU = torch.device("cpu")


def bf16_case(shape: Shape) -> Case:
    problem = next(p for p in problems() if p.name == "linear/bias_relu")
    return Case(problem, shape, Setting("bf16", "highest"))


def test_sampling_finds_a_wrong_tile_anywhere() -> None:
    """Tiles of 64 x 64 of a result that is large enough to be sampled."""
    case = bf16_case(Shape(1024, 192, 32))
    data = make_data(case, CPU, seed=0)
    data.refill(signed=True, seed=1)
    assert data.weight is not None
    right = torch.relu(data.x.float() @ data.weight.float().t() + data.parameters.vectors["bias"].float())
    out = right.to(torch.bfloat16)
    reference = SampledReference(case, data, seed=0)
    assert reference.compare(out, 0).ok
    for row in range(0, 1024, 64):
        for column in range(0, 192, 64):
            wrong = out.clone()
            wrong[row : row + 64, column : column + 64] += 1.0
            found = reference.compare(wrong, 0)
            assert not found.ok and found.wrong_elements > 0
    unwritten = out.clone()
    unwritten[777, 100] = math.nan
    assert not reference.compare(unwritten, 0).ok
    assert not reference.compare(out[:, :-1], 0).ok and not reference.compare(out.float(), 0).ok


def test_sampling_takes_the_rows_of_a_matrix() -> None:
    case = Case(custom.problems()["residual"], Shape(1024, 192, 32), Setting("bf16", "highest"))
    data = make_data(case, CPU, seed=0)
    assert data.weight is not None
    vectors = {name: v.float() for name, v in data.parameters.vectors.items()}
    right = data.x.float() @ data.weight.float().t() + vectors["bias"] + vectors["shortcut"]
    reference = SampledReference(case, data, seed=0)
    assert reference.compare(right.to(torch.bfloat16), 0).ok
    of_other_rows = right + vectors["shortcut"].roll(1, 0) - vectors["shortcut"]
    assert not reference.compare(of_other_rows.to(torch.bfloat16), 0).ok


@pytest.mark.parametrize(("count", "wanted"), [(1, 4), (4, 4), (5, 4), (1000, 7), (65536, 128)])
def test_stratified_samples_every_band(count: int, wanted: int) -> None:
    picked = stratified(count, wanted, torch.Generator().manual_seed(0)).tolist()
    assert picked == sorted(set(picked)) and picked[0] == 0 and picked[-1] == count - 1
    assert len(picked) == min(count, wanted)
    if wanted < count:
        assert [index * wanted // count for index in picked] == pytest.approx(list(range(wanted)), abs=1)


# --- runs timed in turn: each as often as it should -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effort", "expected"),
    [(Effort(1, 0.0, 1), 1), (Effort(5, 0.0, 5), 5), (Effort(3, 1e9, 7), 7), (Effort(2, 0.0, 9), 2)],
)
def test_each_runs_as_often_as_it_should(effort: Effort, expected: int) -> None:
    counts = Counter[str]()

    def run(name: str) -> Tensor:
        counts[name] += 1
        return torch.empty(0)

    timer = make_timer(torch.device("cpu"))
    found = in_turn(timer, [lambda: run("a"), lambda: run("b")], effort, 0.0)
    assert [len(each) for each in found] == [expected] * 2 and counts == {"a": expected, "b": expected}
    assert in_turn(timer, [], effort, 0.0) == []
