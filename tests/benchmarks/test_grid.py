"""The grid: a tiny one from end to end, its arithmetic against numbers worked out by hand, its sampled check."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

import epigemm
from benchmarks import grid
from benchmarks.cases import Case, Setting, Shape, all_problems, make_data
from benchmarks.cli import main
from benchmarks.grid import points, tables
from benchmarks.grid.sampling import SampledReference, stratified

CPU = torch.device("cpu")
TINY = ["--grid", "--device", "cpu", "--sweep-m", "1:8", "--sizes", "1x16x24", "1x40x16"]


def run_tiny(folder: Path, *more: str) -> int:
    return main([*TINY, "--peers", "eager", "mm", "--output", str(folder), *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid")
    assert run_tiny(path, "--cases", "linear/bias_relu", "linear/relu_div", "--dtypes", "bf16", "fp32") == 0
    return path


NAMES = ("bias_relu-bf16", "relu_div-bf16", "bias_relu-fp32_high", "relu_div-fp32_high")


@pytest.mark.parametrize("name", NAMES)
def test_every_problem_and_arithmetic_has_its_files(folder: Path, name: str) -> None:
    record = json.loads((folder / f"sweep-{name}.json").read_text())
    assert record["complete"] and record["grid"]["left_out"] == {}
    assert [case["shape"] for case in record["cases"]] == [
        [m, n, k] for n, k in ((16, 24), (40, 16)) for m in (1, 2, 4, 8)
    ]
    for case in record["cases"]:
        assert "candidates" not in case["plan"]
        (group,) = case["groups"]
        assert [m["alternative"] for m in group["measurements"]] == ["epigemm", "eager", "mm"]
        for m in group["measurements"]:
            assert m["ok"] and m["in_turn"]["samples"] >= 9
            assert set(m["accuracy"]) == (set() if m["alternative"] == "mm" else {"signed"})
    assert record["grid"]["floor"]["empty call"]["median_ms"] > 0
    assert record["grid"]["summary"]["points"] == 8
    text = (folder / f"sweep-{name}.md").read_text()
    assert text.count("| eager |") == 8 and "powers of two" in text and "not a test of the choice" in text
    for figure in ("tflops", "ratio"):
        assert (folder / f"{figure}-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_summary_of_all_records(folder: Path) -> None:
    text = (folder / "sweep.md").read_text()
    assert all(
        f"| linear/{problem}, {a} | 8 |" in text
        for problem in ("bias_relu", "relu_div")
        for a in ("bf16", "fp32 high")
    )


def test_render_again(folder: Path, tmp_path: Path) -> None:
    source = folder / "sweep-bias_relu-bf16.json"
    assert main(["--render", str(source), "--output", str(tmp_path)]) == 0
    again = {path.name for path in tmp_path.iterdir()}
    assert again == {path.name for path in folder.iterdir() if "-bias_relu-bf16" in path.name}
    assert (tmp_path / "sweep-bias_relu-bf16.md").read_text() == source.with_suffix(".md").read_text()


def test_a_spent_budget_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(tmp_path, "--dtypes", "bf16", "--time-budget", "0") == 0
    record = json.loads((tmp_path / "sweep-bias_relu-bf16.json").read_text())
    assert record["cases"] == [] and len(record["grid"]["left_out"]) == 8
    assert "8 points: left out: the time budget of 0 s was spent" in capsys.readouterr().out
    assert "budget of 0 s" in (tmp_path / "sweep-bias_relu-bf16.md").read_text()


def test_points_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = points.needed_bytes(bf16_case(Shape(4, 16, 24)))
    monkeypatch.setattr("benchmarks.grid.runner._available_bytes", lambda device: limit / 0.8)
    assert run_tiny(tmp_path, "--dtypes", "bf16") == 0
    record = json.loads((tmp_path / "sweep-bias_relu-bf16.json").read_text())
    assert [8, 16, 24] not in [case["shape"] for case in record["cases"]]
    assert "memory" in record["grid"]["left_out"]["linear/bias_relu 8x16x24 bf16"]


@pytest.mark.parametrize("where", ["first", "last", "nothing written"])
def test_a_wrong_result_exits_with_one(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = epigemm.linear_relu

    def wrong(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        if where != "nothing written":
            right(*arguments, out=out)
            out.view(-1)[0 if where == "first" else -1] += 1.0
        return out

    monkeypatch.setattr(epigemm, "linear_relu", wrong)
    assert run_tiny(tmp_path, "--dtypes", "bf16", "--sweep-m", "8") == 1
    assert (
        "WRONG" in (tmp_path / "sweep-bias_relu-bf16.json").read_text()
        or not json.loads((tmp_path / "sweep-bias_relu-bf16.json").read_text())["cases"][0]["groups"][0][
            "measurements"
        ][0]["ok"]
    )


def test_slow_peers_run_at_some_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow peer has groups of its own, with what it is compared with measured again in turn."""
    monkeypatch.setattr("benchmarks.grid.runner.SOMEWHERE", ("eager",))
    assert run_tiny(tmp_path, "--dtypes", "bf16") == 0
    cases = json.loads((tmp_path / "sweep-bias_relu-bf16.json").read_text())["cases"]
    groups = [[group["name"] for group in case["groups"]] for case in cases]
    assert groups.count(["main", "eager"]) == len(points.some([Shape(*case["shape"]) for case in cases]))
    assert all(names[0] == "main" for names in groups)


def test_some_points_span_rows_and_layers() -> None:
    chosen = points.some(points.sizes(points.ROWS, points.LAYERS))
    assert len(chosen) == points.SOME_POINTS
    assert {1, 65536} <= {shape.m for shape in chosen} and len({shape.m for shape in chosen}) == 12
    assert {(shape.n, shape.k) for shape in chosen} == set(points.LAYERS)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 12])
def test_some_points_visit_every_layer(layers: int) -> None:
    shapes = points.sizes([1, 2, 4, 8], [(n, 8) for n in range(1, layers + 1)])
    chosen = points.some(shapes)
    assert set(chosen) <= set(shapes)
    assert {
        shape.n for shape in points.some(points.sizes(points.ROWS, [(n, 8) for n in range(1, layers + 1)]))
    } == set(range(1, layers + 1))


def bf16_case(shape: Shape) -> Case:
    problem = next(p for p in all_problems() if p.name == "linear/bias_relu")
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


@pytest.mark.parametrize(("count", "wanted"), [(1, 4), (4, 4), (5, 4), (1000, 7), (65536, 128)])
def test_stratified_samples_every_band(count: int, wanted: int) -> None:
    picked = stratified(count, wanted, torch.Generator().manual_seed(0)).tolist()
    assert picked == sorted(set(picked)) and picked[0] == 0 and picked[-1] == count - 1
    assert len(picked) == min(count, wanted)
    if wanted < count:
        assert [index * wanted // count for index in picked] == pytest.approx(list(range(wanted)), abs=1)


# --- the arithmetic of the tables, against numbers worked out by hand -----------------------------------------


def timing(ms: float, half_range: float = 0.0) -> dict[str, float]:
    return {"median_ms": ms, "q1_ms": ms - half_range, "q3_ms": ms + half_range, "min_ms": ms, "samples": 9}


def measured(times: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {
        "name": "g",
        "measurements": [
            {"alternative": name, "in_turn": value, "ok": True, "error": "", "accuracy": {}}
            for name, value in times.items()
        ],
    }


def case_record(
    shape: list[int], *groups: dict[str, Any], plan: dict[str, Any] | None = None
) -> dict[str, Any]:
    m, n, k = shape
    return {
        "case": "x".join(map(str, shape)),
        "problem": "linear/bias_relu",
        "dtype": "bf16",
        "precision": "",
        "shape": shape,
        "flops": 2 * m * n * k,
        "bytes": 2 * (m * k + n * k + m * n),
        "plan": plan or {"fused": False},
        "groups": list(groups),
        "skipped": {},
    }


@pytest.fixture
def record() -> dict[str, Any]:
    fused = {"fused": True, "tile": "128x256x64", "cluster": "2x1", "raster": "along_m", "swizzle": 2}
    small = case_record(
        [16, 1000, 1000],  # 2.064e6 bytes, 3.2e7 flops
        measured({"epigemm": timing(0.002, 0.0001), "eager": timing(0.004), "mm": timing(0.001)}),
        measured({"epigemm": timing(0.004), "nvmath": timing(0.002)}),
    )
    large = case_record(
        [1000, 1000, 1000],
        measured(
            {
                "epigemm": timing(0.1, 0.02),
                "eager": timing(0.2),
                "addmm_activation": timing(0.098, 0.001),
                "mm": timing(0.1),
            }
        ),
        plan=fused | {"plan": [0, 3, 0, 2, 1]},
    )
    copy = {"name": "copy", "value": 4000.0, "unit": "GB/s"}
    return {
        "ceilings": [copy],
        "cases": [small, large],
        "grid": {"floor": {}, "left_out": {"a": "b"}, "of": ["linear/bias_relu", "bf16"]},
    }


def test_points_by_hand(record: dict[str, Any]) -> None:
    small, large = tables.points(record)
    assert small.us == pytest.approx(2.0) and small.spread == pytest.approx(0.1)
    assert small.tflops == pytest.approx(16.0)
    # nvmath is compared with our time of its own group.
    assert small.ratios == pytest.approx({"eager": 2.0, "mm": 0.5, "nvmath": 0.5})
    assert small.best == "nvmath" and small.to_best == pytest.approx(0.5) and small.slower_beyond_noise
    # 2.064e6 bytes at 4e12 bytes/s: 0.516 us of 2 us.
    assert small.bandwidth_share == pytest.approx(0.258)
    assert small.road == "torch"
    assert large.best == "addmm_activation" and large.to_best == pytest.approx(0.98)
    assert not large.slower_beyond_noise  # our lower quartile, 0.08, is below its upper one, 0.099
    assert large.road == "128x256x64 2x1 along_m/2"


def test_the_road_names_splits() -> None:
    plan = {"fused": True, "tile": "64x16x64", "raster": "along_n", "swizzle": 2, "splits": 4}
    assert tables.road(plan) == "64x16x64 along_n/2 splits 4"
    assert tables.road(plan | {"splits": 1}) == "64x16x64 along_n/2"
    assert tables.road(plan | {"fused": False}) == tables.FALLBACK == "torch"


def test_summary_by_hand(record: dict[str, Any]) -> None:
    summary = tables.summarise(record)
    assert summary.points == 2 and summary.left_out == 1
    assert summary.geomean == pytest.approx(0.7)  # sqrt(0.5 * 0.98)
    assert summary.worst == pytest.approx(0.5) and summary.worst_at == "16x1000x1000"
    assert (summary.below_near, summary.below_level, summary.slower_beyond_noise) == (1, 2, 1)
    assert summary.bare_geomean == pytest.approx(math.sqrt(0.5))
    assert summary.bare_worst == pytest.approx(0.5) and summary.slower_than_bare == 1
    assert summary.small_m_share == pytest.approx(0.258) and summary.small_m_share_at == "16x1000x1000"
    assert summary.geomeans == pytest.approx(
        {"eager": 2.0, "mm": math.sqrt(0.5), "nvmath": 0.5, "addmm_activation": 0.98}
    )
    assert json.loads(json.dumps(tables.with_summary(record)))["grid"]["summary"] == dataclasses.asdict(
        summary
    )


def test_tables_name_the_best_peer_at_each_point(record: dict[str, Any]) -> None:
    table = tables.point_table(record)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["best peer"] for row in rows] == ["nvmath", "addmm_activation"]
    assert [row["vs best peer"] for row in rows] == ["0.500", "0.980"]
    assert [row["vs mm"] for row in rows] == ["0.500", "1.000"]
    assert [row["vs nvmath"] for row in rows] == ["0.500", ""]


def test_nothing_measured_has_no_mean() -> None:
    assert tables.geomean([]) is None and tables.geomean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "arguments",
    [["--sizes", "8x16"], ["--cases", "elementwise/sigmoid"], ["--cases", "no_such_case"]],
    ids=lambda a: " ".join(a),
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grid", "--device", "cpu", *arguments, "--list"]) == 2
    assert capsys.readouterr().err


def test_the_grid_by_default() -> None:
    found = grid.select([], grid.sizes(grid.ROWS, grid.LAYERS), [Setting("bf16", "highest")])
    assert len(found) == 17 * 7 and {case.problem.name for case in found} == {"linear/bias_relu"}


@pytest.mark.gpu
def test_a_small_grid_on_a_gpu(tmp_path: Path) -> None:
    sizes = ["--sweep-m", "1", "64", "1024", "--sizes", "1x1024x512"]
    wanted = ["--cases", "linear/bias_relu", "linear/relu_div", "--peers", "eager", "mm", "addmm_activation"]
    assert main(["--grid", *sizes, *wanted, "--output", str(tmp_path)]) == 0
    for arithmetic in ("bf16", "fp16", "fp32_high"):
        record = json.loads((tmp_path / f"sweep-bias_relu-{arithmetic}.json").read_text())
        assert record["grid"]["floor"]["empty kernel"]["median_ms"] > 0
        for case in record["cases"]:
            names = [m["alternative"] for m in case["groups"][0]["measurements"] if m["ok"]]
            assert names == ["epigemm", "eager", "mm", "addmm_activation"]
        summary = record["grid"]["summary"]
        assert summary["points"] == 3 and summary["small_m_share"] > 0
