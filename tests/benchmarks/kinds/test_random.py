"""Shapes drawn at random: the drawing, the arithmetic of the summary, and a tiny run from end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks import baselines
from benchmarks.cases import Case, Shape, make_data
from benchmarks.cases import random as points
from benchmarks.cases.random import SERIES, Series
from benchmarks.cli import main
from benchmarks.harness import records
from benchmarks.harness.runner import Bench, Ready
from benchmarks.harness.timing import CpuTimer, Effort
from benchmarks.kinds import random as kind
from benchmarks.kinds.points import summarise, summary_table, worst_table
from benchmarks.kinds.random import Drawing
from epigemm.tuner.timing import Run

CPU = torch.device("cpu")
BY_NAME = {s.name: s for s in SERIES}
RELU, SIGMOID = BY_NAME["bias_relu/bf16"], BY_NAME["sigmoid_scale_residual/bf16"]
BETWEEN_SIGMOID = BY_NAME["between/sigmoid_scale_residual/bf16"]
PACKED, PLAIN = BY_NAME["bias_relu/fp32_highest_packed"], BY_NAME["bias_relu/fp32_highest_plain"]

# --- the drawing ----------------------------------------------------------------------------------------------


def test_shapes_follow_from_the_seed_alone() -> None:
    assert points.draw(1, 3) == [Shape(3, 12208, 11000), Shape(135, 6480, 9384), Shape(2, 416, 12040)]
    assert points.between(1)[:2] == [Shape(6, 8192, 8192), Shape(7, 8192, 8192)]
    assert points.draw(7, 50)[:20] == points.draw(7, 20) != points.draw(8, 20)
    assert points.between(7) == points.between(7) != points.between(8)
    assert len(set(points.draw(7, 500))) == 500


# --- the arithmetic, against numbers worked out by hand -------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "us", "best", "ratio", "small", "misses"),
    [
        (RELU, {"epigemm": 100, "eager": 96, "addmm_activation": 98, "mm": 50}, "eager", 0.96, False, False),
        (RELU, {"epigemm": 100, "eager": 99, "addmm_activation": 94}, "addmm_activation", 0.94, False, True),
        (RELU, {"epigemm": 100, "eager": 99, "compile": 50}, "eager", 0.99, False, False),
        (RELU, {"epigemm": 20, "eager": 18.6}, "eager", 0.93, False, True),
        (RELU, {"epigemm": 10.8, "eager": 9.9}, "eager", 9.9 / 10.8, True, False),
        (RELU, {"epigemm": 11.0, "eager": 9.9}, "eager", 0.9, True, True),
        (RELU, {"epigemm": 4.0, "eager": 3.2}, "eager", 0.8, True, False),
        (RELU, {"epigemm": 9.9, "eager": 40}, "eager", 40 / 9.9, True, False),
        (SIGMOID, {"epigemm": 100, "eager": 99, "compile": 96}, "compile", 0.96, False, True),
        (SIGMOID, {"epigemm": 10, "eager": 9.6}, "eager", 0.96, True, False),
        (PLAIN, {"epigemm_plain": 100, "epigemm": 10, "eager": 98}, "eager", 0.98, False, False),
        (PACKED, {"epigemm": 100, "eager": 96}, "eager", 0.96, False, True),
        (BY_NAME["bias_relu/fp32_high"], {"epigemm": 100, "eager": 94}, "eager", 0.94, False, False),
        (BETWEEN_SIGMOID, {"epigemm": 100, "eager": 96}, "eager", 0.96, False, False),
        (RELU, {"epigemm": 100, "mm": 50}, "", None, False, False),
        (RELU, {"eager": 50}, "eager", None, False, False),
    ],
)
def test_the_ratio_and_its_bar(
    of: Series, us: dict[str, float], best: str, ratio: float | None, small: bool, misses: bool
) -> None:
    assert (of.best(us), of.small(us)) == (best, small)
    assert bool(of.why_missed(Shape(1, 8, 16), us)) == misses
    assert of.ratio(us) == (None if ratio is None else pytest.approx(ratio))


def point(m: int, *turns: tuple[float, float], wrong: str = "", **more: float) -> records.CaseResult:
    """Of microseconds of ours and of eager, turn by turn."""
    found = records.CaseResult.of(Case(RELU.problem, Shape(m, 8, 16), RELU.setting))
    for mine, eager in turns or [(math.nan, math.nan)]:
        us = {"epigemm": mine, "eager": eager, **more}
        timed = {name: records.Timing.of([1e-3 * each]) for name, each in us.items() if not wrong}
        measured = [
            records.Measurement(name, name, error=wrong, in_turn=timed.get(name), kernel="plan")
            for name in us
        ]
        found.groups.append(records.Group("turn", measured))
    return found


def test_the_summary_by_hand() -> None:
    found = [
        point(1, (100, 200), mm=50, compile=100),
        point(2, (100, 50), (100, 50), (100, 400), mm=200, addmm_activation=400),  # 0.5 counts
        point(3, (4, 3.2), mm=2),  # 0.8 us behind: not missed
        point(4, (12, 9.6), mm=9),
        point(5, wrong="too far"),
    ]
    summary = summarise(RELU, found)
    assert summary.pop("missed") == [
        "2x8x16: 0.500 of eager, wanted 0.95, epigemm 100.00 us, eager 50.00 us, mm 200.00 us, "
        "addmm_activation 400.00 us",
        "4x8x16: 2.40 us behind eager, epigemm 12.00 us, eager 9.60 us, mm 9.00 us",
    ]
    assert summary == pytest.approx(
        {
            "points": 5,
            "geomean": 0.8**0.5,  # of 2, 0.5, 0.8 and 0.8
            "worst": 0.5,
            "worst_at": "2x8x16",
            "points_under_10us": 2,
            "most_us_behind_under_10us": 2.4,
            "most_us_behind_under_10us_at": "4x8x16",
            "bare_geomean": 0.375**0.25,  # of 0.5, 2, 0.5 and 0.75
            "vs_eager_worst": 0.5,
            "vs_compile_geomean": 1.0,
            "wrong": 1,
        }
    )
    assert [row[1] for row in worst_table({RELU: found}, 1).rows] == ["2x8x16"]
    rows = worst_table({RELU: found[:4]}).rows
    assert [row[2] for row in rows] == ["0.500", "0.800", "0.800", "2.000"]
    row = summary_table({"case": summarise(RELU, found)}).rows[0]
    assert row[2:6] == ["0.894", "0.500 (2x8x16)", "2", "2.400 (4x8x16)"]
    assert rows[0][3] == "0.500 0.500 4.000"


# --- measuring ------------------------------------------------------------------------------------------------


SHAPES = [Shape(m, 16, 24) for m in range(1, 8)]


class Scripted(CpuTimer):
    """Turns take what the script says of ours, in milliseconds, and 1 ms of everybody else."""

    def __init__(self, *script: float) -> None:
        super().__init__(CPU)
        self.script = list(script)

    def round(self, runs: Sequence[Run], host_us: float) -> list[float]:
        return [self.script.pop(0), *(1.0 for _ in runs[1:])]


def test_a_point_below_its_bar_is_measured_twice_more() -> None:
    bench = Bench(CPU, Effort(rounds=1, min_ms=0.0, max_rounds=1))
    bench.timer = timer = Scripted(1.0, 1.1, 1.02, 1.2, 0.5)
    drawing = Drawing(bench, [baselines.BASELINES[name] for name in ("eager", "mm")])
    found = list(drawing.measure([RELU], SHAPES[:3]))
    ratios = [[RELU.ratio(group.us()) for group in result.groups] for result in found]
    assert ratios == [[1.0], pytest.approx([1 / 1.1, 1 / 1.02, 1 / 1.2]), [2.0]] and not timer.script


# --- from end to end ------------------------------------------------------------------------------------------


class Judge:
    """Says of eager's result how far off it is."""

    def __init__(self, off: float) -> None:
        self.off = off

    def compare(self, out: torch.Tensor, roundings: int) -> records.Accuracy:
        return records.Accuracy(False, 1, 9.0, self.off, 1)


@pytest.mark.parametrize(
    ("ours", "eager", "is_right"),
    [
        (1.75, 0.875, True),
        (1.875, 0.875, False),
        (math.inf, 2.0, False),
        (math.nan, 2.0, False),
        (1.125, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, math.nan, False),
    ],
)
def test_the_fallback_may_be_off_by_twice_as_much_as_eager(ours: float, eager: float, is_right: bool) -> None:
    """Of eager's own GEMM the bound may not hold either; a kernel of ours has its bound to keep."""
    case, judge = Case(RELU.problem, SHAPES[0], RELU.setting), Judge(eager)
    for kernel, expected in ((baselines.FALLBACK, is_right), ("a tile of ours", False)):
        measured = records.Measurement("epigemm", "epigemm", kernel=kernel)
        measured.accuracy["signed"] = records.Accuracy(False, 1, 9.0, ours, 1)
        ready = Ready(measured, baselines.Alternative(lambda: torch.empty(0)))
        kind._allow_fallback(judge, case, make_data(case, CPU, 0), ready)  # type: ignore[arg-type]
        assert bool(measured.why_wrong) != expected


@pytest.mark.gpu
def test_a_few_points_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--random", "1", "--count", "6", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "random-1" / "summary.json").read_text())
    assert summary["skipped"] == {} and summary["driver"]
    record = json.loads((tmp_path / "random-1" / "record.json").read_text())
    assert len(record["cases"]) == 6 * 5
    measured = [m for case in record["cases"] for m in case["groups"][0]["measurements"]]
    assert not any(m["error"] for m in measured) and all(m["in_turn"] for m in measured)
    assert sum(m["alternative"] == "compile" for m in measured) == 2 * 5
