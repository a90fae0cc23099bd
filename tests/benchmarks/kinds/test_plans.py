"""`python -m benchmarks --plans`: what it takes, and on a GPU its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Shape
from benchmarks.cli import main
from tools import judge_costs

SHAPES = [Shape(16, 256, 128), Shape(300, 512, 256)]


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
