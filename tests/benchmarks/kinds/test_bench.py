"""`python -m benchmarks` at tiny sizes: its record, its files, and that a wrong result can not pass."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import epigemm

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks import baselines
from benchmarks.cases import CUSTOM, ELEMENTWISE, GLU, LINEAR, Setting, custom, glu, problems
from benchmarks.cli import main
from benchmarks.harness import environment
from benchmarks.harness.records import CaseResult, Group, Measurement, Timing
from benchmarks.kinds import bench

TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}
TOP = Path(__file__).parents[3]
QUICK = ["--device", "cpu", "--quick", "--dtypes", "fp32", "--peers", "epigemm", "eager", "mm"]
SIZES = ["--sizes", "8x16x24", "8x32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the command line as a user starts it."""
    path = tmp_path_factory.mktemp("bench")
    trees = ",".join(f"{name}={tree}" for name, tree in TREES.items())
    command = [sys.executable, "-m", "benchmarks", *QUICK, *SIZES, "--trees", trees, "--output", str(path)]
    command += ["--cases", "linear/bias_relu", "elementwise/bias_relu", "scale_batch_norm"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=TOP)
    assert run.returncode == 0, run.stdout + run.stderr
    (path / "stdout.txt").write_text(run.stdout)
    return path


@pytest.fixture(scope="module")
def record(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return loaded


def test_record_says_where_and_from_which_source(record: dict[str, Any]) -> None:
    assert record["schema"] == 2 and record["complete"] is True
    about = record["environment"]
    assert about["trees"] == TREES
    assert about["torch"] == torch.__version__
    assert about["epigemm"] == epigemm.build_info()
    assert about["device"] == "cpu" and about["gpu"] is None and about["cpu"]["name"]
    assert "/" not in " ".join(about["command"][3:]).replace("linear/", "").replace("elementwise/", "")


def test_record_has_what_every_measurement_needs(record: dict[str, Any]) -> None:
    names = {case["case"] for case in record["cases"]}
    assert any("linear/bias_relu" in name for name in names)
    assert any("elementwise/bias_relu" in name for name in names)
    assert any("scale_batch_norm:train" in name for name in names)
    for case in record["cases"]:
        assert case["flops"] > 0 or "elementwise" in case["problem"]
        assert case["bytes"] > 0 and case["formula"] and case["groups"]
        for group in case["groups"]:
            alternatives = {measurement["alternative"] for measurement in group["measurements"]}
            assert {"epigemm", "eager"} <= alternatives
            for measurement in group["measurements"]:
                assert measurement["error"] == ""
                timing = measurement["in_turn"]
                assert 0 < timing["min_ms"] <= timing["q1_ms"] <= timing["median_ms"] <= timing["q3_ms"]
                assert timing["samples"] >= 5
                if measurement["alternative"] == "mm":
                    assert measurement["accuracy"] == {}
                    continue
                ours = measurement["alternative"] == "epigemm"
                assert bool(measurement["kernel"]) == ours
                assert set(measurement["accuracy"]) == ({"uniform", "signed"} if ours else {"uniform"})
                for accuracy in measurement["accuracy"].values():
                    assert accuracy["ok"] is True and accuracy["wrong_elements"] == 0
                    assert 0 <= accuracy["fraction_of_bound"] <= 1


def test_ratios_are_of_the_times_of_the_record(folder: Path, record: dict[str, Any]) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["kind"] == "bench" and summary["complete"] and summary["wrong"] == {}
    assert {name: summary[name] for name in TREES} == TREES
    for case in record["cases"]:
        figures = summary["cases"][case["case"]]
        (group,) = case["groups"]
        times = {m["alternative"]: m["in_turn"]["median_ms"] for m in group["measurements"]}
        assert figures["ms"] == pytest.approx(times, abs=1e-5) and figures["best"] == "eager"
        wanted = {"vs_eager": times["eager"] / times["epigemm"], "vs_best": times["eager"] / times["epigemm"]}
        if "mm" in times:
            wanted |= {
                "vs_bare": times["mm"] / times["epigemm"],
                "eager_vs_bare": times["mm"] / times["eager"],
            }
        assert {key: figures[key] for key in wanted} == pytest.approx(wanted, abs=1e-4)


def of_times(problem: str, dtype: str, **ms: float) -> CaseResult:
    group = Group(
        "turn 1",
        [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()],
    )
    return CaseResult("case", problem, (), "", (1000, 4300, 64), dtype, "", 1, 1, groups=[group])


def test_the_bound_of_a_batch_norm_in_training() -> None:
    """The product, and 4 bytes of each element (8,600 x 2,000 at 4.3 TB/s: 4 us)."""
    training = of_times("linear/scale_batch_norm:train", "bf16", epigemm=0.01, mm=0.004)
    assert bench.bound(training) == pytest.approx({"bound_ms": 0.008, "vs_bound": 0.8})
    assert bench.figures([training])["cases"]["case"]["vs_bound"] == pytest.approx(0.8)
    for problem, dtype in (("linear/scale_batch_norm", "bf16"), ("linear/scale_batch_norm:train", "fp32")):
        assert bench.bound(of_times(problem, dtype, epigemm=0.01, mm=0.004)) == {}
    for times in ({"epigemm": 0.01}, {"mm": 0.004}):
        assert bench.bound(of_times("linear/scale_batch_norm:train", "bf16", **times)) == {}


def test_files(folder: Path, record: dict[str, Any]) -> None:
    text = (folder / "tables.md").read_text()
    assert all(case["case"] in text for case in record["cases"])
    plots = sorted(path.name for path in folder.glob("*.png"))
    assert any("speedup" in name for name in plots)
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    text = (folder / "stdout.txt").read_text()
    assert "eager" in text and "epigemm" in text


def run_one(case: str = "elementwise/bias_relu", *more: str) -> int:
    return main([*QUICK, "--sizes", "8x32", "--cases", case, *more])


def test_a_right_result_exits_with_zero() -> None:
    assert run_one() == 0


@pytest.mark.parametrize("mistake", ["one element", "nothing written", "no bias", "raises"])
def test_a_wrong_result_exits_with_one(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = epigemm.bias_relu

    def wrong(x: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor) -> torch.Tensor:
        if mistake == "raises":
            raise RuntimeError("deliberately broken")
        if mistake != "nothing written":
            right(x, None if mistake == "no bias" else bias, out=out)
        if mistake == "one element":
            out.view(-1)[-1] += 1e-3
        return out

    monkeypatch.setattr(epigemm, "bias_relu", wrong)
    monkeypatch.setattr(baselines, "planned", lambda *_, **__: "any")
    assert run_one("elementwise/bias_relu", "--output", str(tmp_path)) == 1
    measurements = [
        measurement
        for case in json.loads((tmp_path / "record.json").read_text())["cases"]
        for group in case["groups"]
        for measurement in group["measurements"]
        if measurement["alternative"] == "epigemm"
    ]
    assert measurements and not any(measurement["in_turn"] for measurement in measurements)
    assert re.search(r"wrong|broken", capsys.readouterr().out, re.I)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cases", "no_such_case"],
        ["--sizes", "8xx"],
        ["--trees", "csrc=1"],
        ["--peers", "no_such_peer"],
        ["--between"],
        ["--short"],
        ["--cases", "glu/silu", "--sizes", "8x33x16"],
        ["--device", "cuda:99"],
    ],
    ids=lambda a: " ".join(a),
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    assert capsys.readouterr().err


def test_the_real_sizes_are_those_of_the_problem_set() -> None:
    """2/76, 2/70, 2/33, 2/63: 1024; 8192 -> 8192. 2/39: 16384; 4096 -> 4096. 1/21: 4096 x 393216."""
    for real, square, batch, wide in (
        (True, "1024x8192x8192", "16384x4096x4096", "4096x393216"),
        (False, "128x512x1024", "128x512x1024", "16x16384"),
    ):
        found = {
            (model, str(shape))
            for problem in problems.problems()
            for shape, models in problems.sizes(problem, real=real).items()
            for model in models
        }
        squares = {(model, square) for model in ("2/76", "2/70", "2/33", "2/63")}
        assert found == {*squares, ("2/39", batch), ("1/21", wide)}


def test_epilogues_in_python_and_pairs_of_products(tmp_path: Path) -> None:
    """Rows like all others, where they are named."""
    command = ["--device", "cpu", "--quick", "--dtypes", "fp32", "bf16", "--peers", "builtin", "eager", "mm"]
    chosen = ["custom/bias_relu", "custom/dequantise", "custom/clamp", "glu/gelu"]
    assert main([*command, "--sizes", "6x32x24", "--cases", *chosen, "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    settings = ("fp32 highest", "bf16")
    assert set(summary["cases"]) == {f"{name} 6x32x24 {each}" for name in chosen for each in settings}
    for name, found in summary["cases"].items():
        assert {"epigemm", "eager", "mm"} <= set(found["ms"]) and found["vs_eager"] > 0
        assert ("vs_builtin" in found) == name.startswith("custom/bias_relu")


def test_what_is_measured_unless_cases_are_named() -> None:
    setting = [Setting("bf16", "highest")]
    five = problems.select([], [], setting, real=True)
    assert {case.problem.kind for case in five} == {LINEAR, ELEMENTWISE}
    others = problems.select(["custom/*", "glu/*"], [], setting, real=True)
    sizes = Counter(case.problem.kind for case in others)
    assert sizes == {CUSTOM: 3 * len(custom.problems()), GLU: sum(map(len, glu.LAYERS.values()))}
    assert all(case.models for case in others if case.problem.kind == GLU)


def test_trees_of_a_checkout() -> None:
    trees = environment.source_trees()
    if trees:
        assert set(trees) == {"csrc", "python", "modified"}
        assert all(re.fullmatch("[0-9a-f]{40}", trees[name]) for name in ("csrc", "python"))
    with pytest.raises(ValueError, match="--trees"):
        environment.parse_trees("csrc=abc,python=def")
