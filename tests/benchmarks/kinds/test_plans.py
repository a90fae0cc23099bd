"""`python -m benchmarks --plans`: what it takes, and on a GPU its record."""

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

from benchmarks.cases import Case, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.cli import main
from benchmarks.harness.runner import Bench
from benchmarks.kinds import plans
from epigemm.arguments.calls import LinearCall
from epigemm.tuner.tuner import Candidate
from tools import judge_costs

SHAPES = [Shape(16, 256, 128), Shape(300, 512, 256)]


RIGHT, OTHER, REFUSED, OTHER_ORDER = (0, 0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 2, 0, 1, 1), (0, 0, 1, 2, 1)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four plans, on a CPU: two run, one cannot, one is in an order of tiles of its own."""

    def families(call: LinearCall, *, within: float) -> Iterator[Any]:
        assert within == float("inf") and call.weight.shape == (SHAPES[0].n, SHAPES[0].k)
        out = call.new_out()

        def run(plan: tuple[int, ...]) -> Tensor:
            if plan == REFUSED:
                raise RuntimeError("no such kernel")
            assert call.bias is not None
            right = torch.relu(call.x.float() @ call.weight.float().t() + call.bias.float())
            return out.copy_(right)

        plans_ = (RIGHT, OTHER, REFUSED, OTHER_ORDER)
        found = [Candidate(plan, "any", lambda plan=plan: run(plan)) for plan in plans_]  # type: ignore[misc]
        fallback = Candidate((), "torch", lambda: run(RIGHT))
        yield SimpleNamespace(
            arithmetic="any", candidates=found, fallback=fallback, setting=nullcontext, left_out=()
        )

    answers = [
        {"plan": list(plan), "predicted_us": 2.0, "tile": str(plan[1])} for plan in (RIGHT, OTHER, REFUSED)
    ]
    considered = [SimpleNamespace(arithmetic="any", plan={"candidates": answers})]
    monkeypatch.setattr("epigemm.tuner.tuner.families", families)
    monkeypatch.setattr(
        "benchmarks.kinds.plans.consider",
        lambda call: SimpleNamespace(found=SimpleNamespace(tried=considered)),
    )


@pytest.mark.usefixtures("planned")
def test_the_planners_candidates_are_timed() -> None:
    bench = Bench(torch.device("cpu"), plans._EFFORT)
    case = Case(problems()[0], SHAPES[0], Setting("bf16", "highest"))
    (point,) = plans.sweep(bench, case)
    assert not point["error"] and point["shape"] == [16, 256, 128] and point["fallback_us"] > 0
    assert {tuple(plan["plan"]) for plan in point["plans"]} == {RIGHT, OTHER}
    assert point["left_out"] == [f"{REFUSED}: RuntimeError: no such kernel"]
    assert any("any  0  K in 1: 1," in line for line in judge_costs.report([point]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_plan_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    command = ["--plans", "--dtypes", dtype, "--sizes", *map(str, SHAPES), "--output", str(tmp_path)]
    assert main(command) == 0
    points = json.loads((tmp_path / "plans.json").read_text())["plan_points"]
    assert points and not any(point["error"] for point in points)
    assert all(plan["predicted_us"] > 0 for point in points for plan in point["plans"])
    assert judge_costs.report(points)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kind"] == "plans" and sum(summary["cases"].values()) == len(points)
