"""`python -m benchmarks --plans` and `--tune`: what they take, and on a GPU their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Setting, Shape
from benchmarks.cli import main
from benchmarks.kinds import plans
from benchmarks.kinds.plans import PlanPoint, PlanTime
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
