"""Layers with a short K: the drawing, the bars, against numbers worked out by hand, and a tiny run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Case, Shape, short
from benchmarks.cases.short import ShortSeries
from benchmarks.cli import main
from benchmarks.harness.records import CaseResult, Group, Measurement, Timing
from benchmarks.kinds.points import counted, short_table, summarise_short

MULTIPROCESSORS = 132
MANY, FEW = Shape(16896, 512, 256), Shape(16768, 512, 256)  # 264 tiles and 262
SERIES = {series.name: series for series in short.select([], MULTIPROCESSORS)}
RELU, RESIDUAL = SERIES["bias_relu/bf16"], SERIES["residual/bf16"]

# --- the drawing ------------------------------------------------------------------------------------------------------


def test_shapes_follow_from_the_seed_alone() -> None:
    assert short.draw(7, 2) == [Shape(18251, 408, 56), Shape(20908, 704, 288)]
    assert short.draw(7, 50)[:20] == short.draw(7, 20) != short.draw(8, 20)
    assert len(set(short.draw(7, 500))) == 500


# --- the bars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("series", "shape", "us", "why"),
    [
        (RELU, MANY, {"epigemm": 100, "mm": 90, "eager": 120}, ""),
        (RELU, MANY, {"epigemm": 100, "mm": 89, "eager": 120}, "0.890 of the bare product, wanted 0.9"),
        (RELU, FEW, {"epigemm": 10, "mm": 8, "eager": 12}, ""),
        (
            RELU,
            FEW,
            {"epigemm": 10.1, "mm": 8, "eager": 12},
            "2.10 us behind the bare product, at most 2 wanted",
        ),
        (RELU, FEW, {"epigemm": 100, "mm": 98, "eager": 98.1}, ""),
        (RELU, FEW, {"epigemm": 100, "mm": 98, "eager": 97.9}, "1.021 of eager's time"),
        (RELU, MANY, {"epigemm": 100, "mm": 99, "eager": 97}, "1.031 of eager's time"),
        (RELU, FEW, {"epigemm": 9.9, "mm": 9, "eager": 9}, ""),
        (RELU, FEW, {"epigemm": 9.9, "mm": 9, "eager": 8.8}, "1.10 us behind eager"),
        (RELU, FEW, {"epigemm": 10.4, "mm": 9, "eager": 9.6}, ""),
        (RELU, MANY, {"epigemm": 100, "mm": 99}, ""),
        # Its bytes: 16896 x (256 + 2 x 512) and 512 x 256 elements, 43.5 MB: 10.12 us.
        (RESIDUAL, MANY, {"epigemm": 11.2, "mm": 5, "eager": 30}, ""),
        (RESIDUAL, MANY, {"epigemm": 11.3, "mm": 5, "eager": 30}, "0.896 of the bare product, wanted 0.9"),
        (RESIDUAL, MANY, {"epigemm": 20, "mm": 18, "eager": 30}, ""),
    ],
)
def test_what_a_point_misses(series: ShortSeries, shape: Shape, us: dict[str, float], why: str) -> None:
    assert series.why_missed(shape, us) == why


def point(shape: Shape, *turns: dict[str, float]) -> CaseResult:
    """Of microseconds, turn by turn."""
    found = CaseResult.of(Case(RELU.problem, shape, RELU.setting))
    for us in turns:
        taken = [Measurement(name, name, in_turn=Timing.of([1e-3 * each])) for name, each in us.items()]
        found.groups.append(Group("turn", taken))
    return found


def test_the_summary_by_hand() -> None:
    points = [
        point(MANY, {"epigemm": 100.0, "mm": 92.16, "eager": 200.0}),
        point(Shape(20000, 512, 256), {"epigemm": 100.0, "mm": 100.0, "eager": 100.0}),
        point(FEW, {"epigemm": 20.0, "mm": 17.0, "eager": 21.0}),
        point(Shape(16, 48, 48), {"epigemm": 4.0, "mm": 4.0, "eager": 8.0}),
        point(Shape(64, 48, 48), {"epigemm": 4.0}),
    ]
    found = summarise_short(RELU, points)
    waves, few = found["waves"], found["elsewhere"]
    assert (waves["points"], waves["geomean"]) == (2, pytest.approx(0.96))
    assert (waves["worst"], waves["worst_at"]) == (pytest.approx(0.9216), str(MANY))
    assert (few["points"], few["geomean"]) == (2, pytest.approx(0.85**0.5))
    assert (few["most_us_behind"], few["most_us_behind_at"]) == (pytest.approx(3.0), str(FEW))
    assert found["vs_eager"]["worst"] == pytest.approx(1.0)
    assert found["missed"] == [
        "geometric mean 0.960 of the bare product, wanted 0.97",
        f"{FEW}: 3.00 us behind the bare product, at most 2 wanted, epigemm 20.00 us, mm 17.00 us, eager 21.00 us",
    ]
    assert found["points"] == 4
    (row,) = short_table({"bias_relu/bf16": found}).rows
    assert row[1:7] == ["2", "0.960", f"0.922 ({MANY})", "2", "0.922", f"3.000 ({FEW})"] and row[-1] == "2"


# --- from end to end --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    """Both types, with and without a matrix."""
    cases = ["bias_relu/bf16", "residual/fp16", "layers/bias_gelu/bf16"]
    given = ["--random", "2", "--short", "--count", "3", "--cases", *cases, "--output", str(tmp_path)]
    assert main(given) == 0
    summary = json.loads((tmp_path / "short-2" / "summary.json").read_text())
    assert set(summary["cases"]) == set(cases) and not summary["left_out"]
    for case in summary["cases"].values():
        assert case["waves"]["points"] + case["elsewhere"]["points"] == case["points"]
    assert [case["points"] for case in summary["cases"].values()] == [len(short.LAYERS), 3, 3]


def test_the_turn_that_counts_is_the_median() -> None:
    found = point(MANY, *({"epigemm": mine, "mm": 99.0} for mine in (100.0, 120.0, 90.0)))
    assert counted(RELU, found) == pytest.approx({"epigemm": 100.0, "mm": 99.0})
