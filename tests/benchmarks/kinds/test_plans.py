"""`python -m benchmarks --plans` and `--tune`: what they take, and on a GPU their records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Setting, Shape
from benchmarks.cli import main
from benchmarks.kinds import plans
from benchmarks.kinds.plans import PlanPoint, PlanTime
from epigemm.calls import LinearCall
from epigemm.candidates import Candidate
from tools import judge_costs

SHAPES = [Shape(16, 256, 128), Shape(300, 512, 256)]


def test_selection() -> None:
    settings = [Setting("bf16", "highest"), Setting("fp32", "high")]
    chosen = plans.select(["linear/relu_div"], SHAPES, settings)
    assert [(case.shape, case.setting) for case in chosen] == [(s, a) for a in settings for s in SHAPES]
    assert {case.problem.epilogue for case in plans.select([], SHAPES, settings)} == {"bias_relu"}
    with pytest.raises(ValueError, match="--cases"):
        plans.select(["elementwise/sigmoid"], SHAPES, settings)
    for shapes in ([], [Shape(8, 8)]):
        with pytest.raises(ValueError, match="--plans"):
            plans.select([], shapes, settings)


@pytest.mark.parametrize(
    "arguments",
    [["--plans", "--random", "1"], ["--tune", "--random", "1"], ["--tune"], ["--plans", "--peers", "mm"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: --")


def test_the_table_names_the_best_plan_and_counts_the_wrong() -> None:
    point = PlanPoint("linear/bias_relu", 1, 2, 3, "bf16", "", "bf16")
    point.plans = [
        PlanTime([0], "small", 4.0, 4.0, 4.0, 5, ok=False),
        PlanTime([1], "large", 5.0, 5.0, 5.0, 5),
    ]
    point.others = [PlanTime([], "mm", 6.0, 6.0, 6.0, 5)]
    assert plans.table([point]).rows == [["linear/bias_relu 1x2x3 bf16", "5", "large [1]", "6", "2", "1"]]
    assert point.failed


RIGHT, OFF, REFUSED, OTHER_ORDER = (0, 0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 2, 0, 1, 1), (0, 0, 1, 2, 1)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four plans, on a CPU: one is right, one writes half, one cannot run, one is in an order of tiles of its own."""

    def families(call: LinearCall, *, within: float) -> Iterator[Any]:
        assert within == float("inf") and call.weight.shape == (SHAPES[0].n, SHAPES[0].k)
        out = call.new_out()

        def run(plan: tuple[int, ...]) -> Tensor:
            if plan == REFUSED:
                raise RuntimeError("no such kernel")
            assert call.bias is not None
            right = torch.relu(call.x.float() @ call.weight.float().t() + call.bias.float())
            rows = len(out) // 2 if plan == OFF else len(out)
            out[:rows] = right[:rows]
            return out

        plans_ = (RIGHT, OFF, REFUSED, OTHER_ORDER)
        found = [Candidate(plan, "any", lambda plan=plan: run(plan)) for plan in plans_]  # type: ignore[misc]
        fallback = Candidate((), "torch", lambda: run(RIGHT))
        kind = SimpleNamespace(arithmetic="any")
        yield SimpleNamespace(
            kind=kind, candidates=found, fallback=fallback, setting=nullcontext, left_out=()
        )

    answers = [
        {"plan": list(plan), "predicted_us": 2.0, "tile": str(plan[1])} for plan in (RIGHT, OFF, REFUSED)
    ]
    considered = [SimpleNamespace(arithmetic="any", plan={"candidates": answers})]
    monkeypatch.setattr("epigemm.candidates.families", families)
    monkeypatch.setattr("epigemm.execution.considered", lambda call: considered)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("checked", [True, False])
def test_the_planners_candidates_are_checked_and_timed(dtype: str, checked: bool, tmp_path: Path) -> None:
    sweep = plans.PlanSweep(torch.device("cpu"), checked=checked)
    cases = plans.select([], SHAPES[:1], [Setting(dtype, "highest")])
    (point,) = plans.measure(sweep, cases, {}, tmp_path)
    assert not point.error and [point.m, point.n, point.k] == [16, 256, 128]
    assert {tuple(plan.plan): plan.ok for plan in point.plans} == {RIGHT: True, OFF: not checked}
    assert [other.name for other in point.others] == ["torch", "mm", "eager"]
    assert point.left_out == [f"{REFUSED}: RuntimeError: no such kernel"]
    record = json.loads((tmp_path / "plans.json").read_text())
    assert record["complete"] and len(record["plan_points"]) == 1
    assert any("any  0  K in 1: 1," in line for line in judge_costs.report(record["plan_points"]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_plan_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    command = ["--plans", "--dtypes", dtype, "--sizes", *map(str, SHAPES), "--output", str(tmp_path)]
    assert main(command) == 0
    points = json.loads((tmp_path / "plans.json").read_text())["plan_points"]
    assert points and not any(point["error"] for point in points)
    assert all(plan["ok"] and plan["predicted_us"] > 0 for point in points for plan in point["plans"])
    assert all({other["name"] for other in point["others"]} == {"torch", "mm", "eager"} for point in points)
    assert judge_costs.report(points)


@pytest.mark.gpu
def test_tune_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--tune", "--random", "1", "--count", "3", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["cases"]) == 3 and summary["worst"] <= summary["geomean"]
