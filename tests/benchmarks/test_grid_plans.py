"""Every plan at every point of a grid: which plans there are, and the record of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")

from benchmarks import plan_kernels
from benchmarks.cases import Case, Data, Setting, Shape, all_problems
from benchmarks.cli import main
from benchmarks.grid import plans
from epigemm.timing import Run

TINY = ["--plans", "--grid", "--device", "cpu", "--sweep-m", "1:4", "--sizes", "1x16x24", "--dtypes", "bf16"]
HOPPER = (90, 132)


def case_of(shape: Shape, dtype: str = "bf16") -> Case:
    problem = next(p for p in all_problems() if p.name == "linear/bias_relu")
    return Case(problem, shape, Setting(dtype, "high" if dtype == "fp32" else "highest"))


def tile(numbers: list[int], schedule: str = "pingpong") -> dict[str, Any]:
    return {
        "family": ["sm90_tma", "sm90_swap_ab"][numbers[0]],
        "plan": numbers,
        "tile": f"t{numbers[1]}",
        "cluster": "1x1",
        "schedule": schedule,
    }


def fake_family(case: Case, data: Data, out: torch.Tensor) -> plan_kernels.Family:
    """Plans computed by PyTorch: tile 0 is right, tile 1 forgets the bias, tile 2 cannot be launched."""
    assert data.weight is not None
    weight, bias = data.weight.float(), data.parameters.vectors["bias"].float()

    def bind(numbers: Any) -> Run:
        def run() -> torch.Tensor:
            if numbers[1] == 2:
                raise RuntimeError("does not fit\nat all")
            z = data.x.float() @ weight.t()
            return out.copy_(torch.relu(z if numbers[1] == 1 else z + bias))

        return run

    tiles = [tile([0, index, 1, 4, 1 + index]) for index in range(3)]
    answer = {
        "why_not": "slower",
        "candidates": [tiles[0] | {"raster": "along_n", "swizzle": 4, "predicted_us": 7.0}],
    }
    return plan_kernels.Family("bf16", answer, tiles, bind)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.setattr(plans, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(plans, "families", lambda *arguments: [fake_family(*arguments)])

    def run(*more: str) -> tuple[int, dict[str, Any]]:
        status = main([*TINY, "--peers", "eager", "mm", "--output", str(tmp_path), *more])
        return status, json.loads((tmp_path / "plans.json").read_text())

    return run


def test_every_plan_at_every_point(
    swept: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = swept()
    assert status == 1 and record["complete"] and record["left_out"] == {}
    assert [(p["m"], p["n"], p["k"], p["dtype"]) for p in record["plan_points"]] == [
        (m, 16, 24, "bf16") for m in (1, 2, 4)
    ]
    for point in record["plan_points"]:
        by_plan = {tuple(plan["plan"]): plan for plan in point["plans"]}
        assert set(by_plan) == {(0, 0, 1, 4, 1), (0, 1, 1, 4, 2)}
        assert by_plan[0, 0, 1, 4, 1]["ok"] and by_plan[0, 0, 1, 4, 1]["predicted_us"] == 7.0
        assert not by_plan[0, 1, 1, 4, 2]["ok"] and by_plan[0, 1, 1, 4, 2]["predicted_us"] is None
        assert point["refused"] == {"[0, 2, 1, 4, 3]": "RuntimeError: does not fit"}
        assert [other["name"] for other in point["others"]] == ["eager", "mm"]
        for row in (*point["plans"], *point["others"]):
            assert 0 < row["q1_us"] <= row["us"] <= row["q3_us"] and row["samples"] >= 5
    text = capsys.readouterr().out
    assert "t0 1x1 pingpong" in text and "WRONG: t1" in text


def test_a_spent_budget_says_what_was_left_out(swept: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    status, record = swept("--time-budget", "0")
    assert status == 0 and record["plan_points"] == [] and len(record["left_out"]) == 3


def test_random_points_unchecked(
    swept: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the shapes of a seed; what cannot be launched is still told apart, what is wrong is not looked for."""
    command = [
        "--random",
        "1272",
        "--count",
        "2",
        "--plans",
        "--unchecked",
        "--device",
        "cpu",
        "--dtypes",
        "bf16",
    ]
    assert main([*command, "--peers", "mm", "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "random-1272" / "plans.json").read_text())
    assert [[p["m"], p["n"], p["k"]] for p in record["plan_points"]] == [[9, 192, 8408], [10457, 264, 8]]
    for point in record["plan_points"]:
        assert sorted(plan["plan"] for plan in point["plans"]) == [[0, 0, 1, 4, 1], [0, 1, 1, 4, 2]]
        assert all(plan["ok"] and plan["fraction_of_bound"] is None for plan in point["plans"])
        assert all(plan["samples"] == 5 for plan in point["plans"])
        assert list(point["refused"]) == ["[0, 2, 1, 4, 3]"] and [o["name"] for o in point["others"]] == [
            "mm"
        ]
    assert "WRONG" not in capsys.readouterr().out


def test_of_many_points_only_their_number_is_shown(
    swept: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("benchmarks.grid.command._SHOWN_POINTS", 2)
    assert swept()[0] == 1
    shown = capsys.readouterr().out
    assert "6 plans at 3 points" in shown and "best plan" not in shown and shown.count("WRONG") == 3


def test_every_order(swept: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    _, record = swept("--all-plans")
    for point in record["plan_points"]:
        numbers = [plan["plan"] for plan in point["plans"]]
        assert sorted(numbers) == [[0, t, r, s, 1 + t] for t in (0, 1) for r in (0, 1) for s in (1, 2, 4, 8)]


def test_without_a_gpu(tmp_path: Path) -> None:
    assert main([*TINY, "--no-peers", "--output", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "plans.json").read_text())["plan_points"]
    assert len(points) == 3 and all("GPU" in point["why_not"] and not point["plans"] for point in points)


def test_a_plan_is_taken_as_it_stands() -> None:
    """Swap-AB kernels have one order of tiles; the other tiles take every order, their splits kept."""
    tiles = [tile([0, 1, 1, 4, 1]), tile([1, 1, 0, 1, 2], "swap-AB"), tile([1, 1, 0, 1, 4], "swap-AB")]
    family = plan_kernels.Family("bf16", {}, tiles, lambda numbers: lambda: torch.empty(0))
    own = [numbers for _, numbers in family.plans(every_order=False)]
    assert own == [[0, 1, 1, 4, 1], [1, 1, 0, 1, 2], [1, 1, 0, 1, 4]]
    every = [numbers for _, numbers in family.plans()]
    assert every[:8] == [[0, 1, r, s, 1] for r in (0, 1) for s in (1, 2, 4, 8)] and every[8:] == own[1:]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_tiles_are_found_where_the_planner_takes_none(dtype: str) -> None:
    found, large = (
        plan_kernels.one_pass_tiles(case_of(shape, dtype), {"fused": False}, -1, HOPPER)
        for shape in (Shape(1, 1024, 4096), Shape(4096, 4096, 4096))
    )
    kernels = [{tuple(each["plan"][:2]) for each in tiles} for tiles in (found, large)]
    assert found and kernels[0] >= kernels[1]
    assert all(each["tile"] and each["cluster"] and each["schedule"] for each in found)
    assert [each["plan"][:2] for each in found] == sorted(each["plan"][:2] for each in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_plans_of_a_small_grid_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    command = ["--plans", "--grid", "--sweep-m", "8", "512", "--sizes", "1x1024x512", "--dtypes", dtype]
    assert main([*command, "--peers", "mm", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "plans.json").read_text())["plan_points"]
    assert {point["m"] for point in found} == {8, 512}
    assert all(point["plans"] and not point["error"] and point["others"] for point in found)
