"""`python -m benchmarks --models` at small sizes: its record and files, its budget, that nothing wrong passes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Setting
from benchmarks.cli import main
from benchmarks.harness.records import EAGER
from benchmarks.models import alternatives, runner, tables, workloads
from benchmarks.models.alternatives import Alternative, Subject
from benchmarks.models.records import (
    BACKEND,
    COMPILED,
    FUSED,
    TITLES,
    UNFUSED,
    Error,
    ModelGroup,
    ModelMeasurement,
    ModelResult,
    Ratio,
)
from benchmarks.models.runner import COMPILING, MAIN, ModelRunner, Point, allowed, distance, why_wrong

CPU = torch.device("cpu")
TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}
# What is tested is no race: another --time-budget behind these takes precedence.
COMMAND = ["--models", "--quick", "--device", "cpu", "--time-budget", "3600"]
HIGHEST, HIGH, BF16 = Setting("fp32", "highest"), Setting("fp32", "high"), Setting("bf16", "highest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    trees = ",".join(f"{name}={tree}" for name, tree in TREES.items())
    command = [*COMMAND, "--cases", "resmlp", "problem_33", "problem_21", "--trees", trees]
    assert main([*command, "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def record(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "models.json").read_text())
    return loaded


def measurements(record: dict[str, Any]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    return [(c, g["name"], m) for c in record["cases"] for g in c["groups"] for m in g["measurements"]]


def test_record_says_what_was_measured_and_where(record: dict[str, Any]) -> None:
    assert record["kind"] == "models" and record["complete"] is True and record["left_out"] == {}
    assert record["environment"]["trees"] == TREES and record["compiler"] == "aot_eager"
    assert {c["model"] for c in record["cases"]} == {"resmlp", "problem_33", "problem_21"}
    assert {(c["dtype"], c["precision"]) for c in record["cases"]} == {
        ("fp32", "highest"),
        ("bf16", "highest"),
    }
    assert {c["mode"] for c in record["cases"] if c["model"] == "problem_33"} == {"inference", "training"}
    assert {c["batch"] for c in record["cases"] if c["model"] == "resmlp"} == {8, 32}
    assert len({c["case"] for c in record["cases"]}) == len(record["cases"])
    assert set(record["absent"]) <= {"timm_vit"}


def test_every_measurement_is_checked_and_timed(record: dict[str, Any]) -> None:
    for case, group, m in measurements(record):
        assert m["error"] == "" and m["wrong"] == "" and m["title"] == TITLES[m["alternative"]]
        timing = m["wall"]
        assert 0 < timing["min_ms"] <= timing["median_ms"] and timing["samples"] == record["effort"]["turns"]
        assert m["host_us"] > 0 and m["prepare_s"] >= 0 and m["device"] is None
        kinds = {"output", "gradients"} if case["mode"] == "training" else {"output"}
        assert set(m["errors"]) == kinds
        assert all(0 <= e["norm"] < 0.1 and 0 <= e["largest"] < 0.1 for e in m["errors"].values())
        others = {x["alternative"] for _, g, x in measurements({"cases": [case]}) if g == group}
        assert set(m["times_faster"]) == others - {m["alternative"]}


def test_alternatives_and_sites(record: dict[str, Any]) -> None:
    for case in record["cases"]:
        main_group, compiling = tables.found(case, MAIN), tables.found(case, COMPILING)
        assert set(main_group) == {EAGER, FUSED}
        if case["batch"] == 32 and case["model"] != "problem_21":
            assert set(compiling) == {EAGER, FUSED, COMPILED, BACKEND}
        else:
            assert compiling == {}
        sites = {name: m["sites"] for name, m in (main_group | compiling).items()}
        assert not sites[EAGER] and not sites.get(COMPILED)
        if case["model"] == "problem_33":
            trained = case["mode"] == "training"
            assert sites[FUSED] == {"linear_mul" if trained else "linear_mul_add": 1}
            assert sites.get(BACKEND, sites[FUSED]) == sites[FUSED]
        assert bool(sites[FUSED]) is (case["model"] != "problem_21")


def test_files_and_rendering_again(folder: Path, record: dict[str, Any], tmp_path: Path) -> None:
    text = (folder / "models.md").read_text()
    for title in ("Slower than without fusion", "Eager, inference, bf16", "Compiled, training, fp32 highest"):
        assert f"## {title}\n" in text
    assert text == tables.markdown(record)
    names = {path.name for path in folder.iterdir()}
    assert {"models.json", "models-inference-fp32_highest.png", "models-training-bf16.png"} <= names
    assert main(["--render", str(folder / "models.json"), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "models.md").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == names - {"models.json"}


def faked(slower: bool) -> dict[str, Any]:
    """A record of one point, at which the fused model takes 2 ms, or half of one, beside eager's 1."""
    ours = 2.0 if slower else 0.5
    ratio = {"median": 1 / ours, "q1": 1 / ours, "q3": 1 / ours}
    inverse = {"median": ours, "q1": ours, "q3": ours}

    def measured(name: str, ms: float, times_faster: dict[str, Any], slow: bool) -> dict[str, Any]:
        return {
            "alternative": name,
            "wall": {"median_ms": ms},
            "device": None,
            "times_faster": times_faster,
            "slower": slow,
            "errors": {},
            "wrong": "",
            "error": "",
            "sites": {"linear_relu": 3},
            "unfused": {"too small": 3} if name == FUSED else {},
        }

    both = [
        measured(EAGER, 1.0, {FUSED: inverse}, False),
        measured(FUSED, ours, {EAGER: ratio}, slower),
    ]
    case = {"case": "a point", "model": "mlp", "batch": 16, "dtype": "bf16", "precision": "highest"}
    case |= {"mode": "inference", "skipped": {}, "groups": [{"name": MAIN, "measurements": both}]}
    return {"cases": [case], "absent": {}, "left_out": {}}


@pytest.mark.parametrize("slower", [False, True])
def test_what_is_slower_is_said_plainly(slower: bool) -> None:
    record = faked(slower)
    table = tables.slower(record)
    assert table.rows == ([["a point", TITLES[FUSED], TITLES[EAGER], "0.500"]] if slower else [])
    assert len(tables.compared(record)) == 1
    (row,) = tables.tables(record)[1].rows
    assert row[:5] == ["mlp", "16", "1", "2" if slower else "0.5", "0.50 SLOWER" if slower else "2.00"]
    assert row[-2:] == ["3 linear_relu", "3: too small"]


@pytest.mark.parametrize(
    ("ours", "slower"),
    [
        ([1.0, 1.0, 1.0, 1.0], False),
        ([0.5, 0.5, 0.5, 0.5], False),
        ([1.005, 1.005, 1.005, 1.005], False),
        ([1.2, 1.2, 1.2, 1.2], True),
        ([1.2, 0.5, 1.2, 0.5], False),
    ],
)
def test_slower_is_a_hundredth_in_most_turns(ours: list[float], slower: bool) -> None:
    assert Ratio.of([1.0] * 4, ours).slower is slower


def test_distance_and_what_is_allowed() -> None:
    exact = [torch.tensor([3.0, 4.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    near = [torch.tensor([3.0, 4.5]), torch.zeros(2)]
    error = distance(near, exact)
    assert math.isclose(error.norm, 0.1) and math.isclose(error.largest, 0.125)
    eager, dtype = {"output": Error(1e-3, 1e-3)}, torch.bfloat16
    limit = allowed(eager["output"], dtype)
    assert why_wrong({"output": Error(limit.norm, limit.largest)}, eager, dtype) == ""
    assert "norm" in why_wrong({"output": Error(1.01 * limit.norm, 0.0)}, eager, dtype)
    assert "largest" in why_wrong({"output": Error(0.0, 1.01 * limit.largest)}, eager, dtype)
    nan = distance([torch.tensor([math.nan, 1.0]), torch.zeros(2)], exact)
    assert not nan.finite and why_wrong({"output": nan}, eager, dtype)


def run_with(monkeypatch: pytest.MonkeyPatch, forward: Any, *flags: str) -> int:
    """The command on one model whose fused form is replaced."""
    prepare = alternatives.PREPARE | {FUSED: lambda subject: Alternative(lambda x: forward(subject, x))}
    monkeypatch.setattr(runner, "PREPARE", prepare)
    return main([*COMMAND, "--cases", "problem_76", "--dtypes", "fp32", "--peers", FUSED, *flags])


def test_a_wrong_result_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def off(subject: Subject, x: Tensor) -> Tensor:
        result: Tensor = subject.model(x) * 1.0001
        return result

    path = tmp_path / "models.json"
    assert run_with(monkeypatch, off, "--output", str(tmp_path)) == 1
    assert (
        "FAILED: problem_76 32 fp32 highest inference: epigemm.fuse: output: norm" in capsys.readouterr().out
    )
    ((_, _, eager), (_, _, fused)) = measurements(json.loads(path.read_text()))
    assert fused["wrong"] and fused["wall"] is None and eager["wall"]


def test_an_exception_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(subject: Subject, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    assert run_with(monkeypatch, fails) == 1
    assert "epigemm.fuse: RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_budget_holds_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    command = [
        *COMMAND,
        "--cases",
        "mlp",
        "--dtypes",
        "fp32",
        "--time-budget",
        "0",
        "--output",
        str(tmp_path),
    ]
    assert main(command) == 0
    record = json.loads(path.read_text())
    assert record["cases"] == []
    assert set(record["left_out"]) == {
        *(f"mlp {batch} fp32 highest {mode}, main" for batch in (8, 32) for mode in workloads.MODES),
        *(f"mlp 32 fp32 highest {mode}, compiling" for mode in workloads.MODES),
    }
    (remark,) = [remark for remark in tables.remarks(record) if "budget" in remark]
    assert remark.startswith("6 points left out: the time budget of 0 s was spent: mlp 8 fp32 highest")


def test_one_alternative_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others still fit."""
    (point,) = runner.points([workloads.PROBLEMS[0]], [HIGHEST], small=True, batches=())
    names = [EAGER, FUSED, COMPILED, BACKEND]
    measured = ModelRunner(CPU, names, runner.QUICK, alternatives.AOT_EAGER, small=True)
    why = "left out: no time"
    monkeypatch.setattr(measured, "_no_time", lambda kind: why if kind == COMPILED else "")
    *_, result = measured.run([point])
    assert result.skipped == {COMPILED: why}
    assert [m.alternative for m in result.groups[-1].measurements] == [EAGER, FUSED, BACKEND]


def test_the_record_is_kept_after_every_point(tmp_path: Path) -> None:
    """A run that is killed has lost nothing that was measured."""
    from benchmarks import models
    from benchmarks.harness import report
    from benchmarks.harness.progress import shown_progress

    options = models.ModelOptions(["problem_76"], (), [HIGHEST, BF16], [FUSED], [], True, 1, None, 0, None)
    planned = models.plan(options, CPU)
    seen: list[int] = []
    original = planned.runner.run

    def spying(points: list[Point]) -> Any:
        for result in original(points):
            yield result
            seen.append(len(json.loads((tmp_path / "kept.json").read_text())["cases"]))

    planned.runner.run = spying  # type: ignore[method-assign, assignment]
    models.measure(report.Console(), planned, shown_progress, tmp_path / "kept.json")
    assert seen == [1, 2]


def test_the_important_comes_first() -> None:
    chosen = runner.points(workloads.NETWORKS[:1], [HIGHEST, HIGH, BF16], small=False, batches=())
    every = ModelRunner(CPU, list(alternatives.PREPARE), runner.QUICK).schedule(chosen)
    assert len(every) == len(set(every)) == 18 + 4
    order = list(dict.fromkeys((str(p.setting), p.mode, group) for p, group in every))
    assert order == [
        ("fp32 highest", "inference", MAIN),
        ("fp32 highest", "training", MAIN),
        ("bf16", "inference", MAIN),
        ("fp32 highest", "inference", COMPILING),
        ("bf16", "training", MAIN),
        ("fp32 highest", "training", COMPILING),
        ("fp32 high", "inference", MAIN),
        ("bf16", "inference", COMPILING),
        ("fp32 high", "training", MAIN),
        ("bf16", "training", COMPILING),
    ]
    assert {p.batch for p, group in every if group == COMPILING} == {256}
    quick = ModelRunner(CPU, [EAGER, FUSED], runner.QUICK).schedule(chosen)
    assert {group for _, group in quick} == {MAIN}


def test_a_training_step_changes_weights_but_not_their_values() -> None:
    """Kept packs must be made again, as in a user's training, while results can still be compared."""
    model = torch.nn.Linear(8, 8)
    before, version = model.weight.detach().clone(), model.weight._version
    subject = Subject(model, (torch.randn(4, 8),), torch.randn(4, 8), "aot_eager")
    step = subject.run(model)
    for _ in range(3):
        step()
    assert model.weight._version == version + 3 and torch.equal(model.weight, before)


def test_each_turn_makes_its_calls() -> None:
    made: list[int] = []

    def call() -> Tensor:
        made.append(1)
        return torch.zeros(1)

    measured = ModelRunner(CPU, [EAGER], runner.QUICK)
    assert runner.turn(call, 7, measured._timer) > 0 and len(made) == 7


@pytest.mark.parametrize("workload", workloads.WORKLOADS, ids=str)
def test_models_and_inputs_follow_their_seeds(workload: workloads.Workload[Any]) -> None:
    def drawn(seed: int) -> tuple[Tensor, ...]:
        return workload.inputs(4, small=True, device=CPU, seed=seed)

    def weights(seed: int) -> list[Tensor]:
        return list(workload.model(small=True, device=CPU, seed=seed).state_dict().values())

    for draw in (drawn, weights):
        for a, b in zip(draw(3), draw(3), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(drawn(3), drawn(4), strict=True):
        assert not torch.equal(a, b) and bool((a != a.flatten()[0]).any())
    assert drawn(3)[0].shape[0] == 4
    if weights(3):
        assert any(not torch.equal(a, b) for a, b in zip(weights(3), weights(4), strict=True))


def test_every_alternative_of_ours_has_one_without_fusion() -> None:
    assert {FUSED, BACKEND} < set(UNFUSED)
    assert set(UNFUSED) | set(UNFUSED.values()) == set(TITLES) == set(alternatives.PREPARE)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cases", "resnet"], "--cases: 'resnet' matches none of the models: mlp, "),
        (["--peers", "quack"], "--peers, --exclude: got 'quack'; with --models: eager, fuse"),
        (["--sizes", "8x8x8"], "--models: goes without --sizes"),
        (["--plans"], "--models: goes without --plans"),
        (["--trees", "csrc=1"], "--trees: expected"),
        (["--rounds", "0"], "--rounds: expected at least 1"),
    ],
)
def test_wrong_usage_is_explained(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_selection_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--list", "--cases", "mlp", "--sweep-m", "4", "--dtypes", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "mlp 4 bf16 inference" in printed and "mlp_batch_norm" not in printed
    assert TITLES[BACKEND].replace("[", "\\[") in printed


def test_device_times_leave_out_what_the_host_cannot_run_ahead_of() -> None:
    measured = ModelRunner(CPU, [EAGER], runner.QUICK)
    ready = [
        runner._Ready(ModelMeasurement(name, name, host_us=host_us), lambda: torch.zeros(1))
        for name, host_us in (("short", 100.0), ("long", 1e5))
    ]
    measured._time_on_device(ready)
    short, long = (r.measurement.device for r in ready)
    assert short is not None and short.samples == runner.QUICK.device_calls
    assert long is None


def test_graphs_are_measured_at_the_smallest_batch_on_a_gpu() -> None:
    chosen = runner.points(workloads.NETWORKS[:1], [HIGHEST], small=False, batches=())
    captured = [(p.batch, p.mode) for p in chosen if runner.captures(p, torch.device("cuda"))]
    assert captured == [(16, "inference")]
    only = runner.points(workloads.PROBLEMS[:1], [HIGHEST], small=False, batches=())
    assert not any(runner.captures(p, torch.device("cuda")) for p in only)
    assert not any(runner.captures(p, CPU) for p in chosen)


@pytest.mark.parametrize(
    ("errors", "failed"),
    [
        ({}, []),
        ({FUSED: "refused"}, [FUSED]),
        ({COMPILED: "no compiler", BACKEND: "no compiler"}, []),
        ({COMPILED: "no compiler"}, []),
        ({EAGER: "no such operator", FUSED: "no such operator"}, [EAGER]),
    ],
)
def test_what_torch_cannot_do_either_is_no_failure_of_ours(errors: dict[str, str], failed: list[str]) -> None:
    names = (EAGER, FUSED, COMPILED, BACKEND)
    group = ModelGroup(MAIN, [ModelMeasurement(name, name, error=errors.get(name, "")) for name in names])
    result = ModelResult("", "", "", 1, "fp32", "highest", "inference", groups=[group])
    assert [m.alternative for m in result.failed()] == failed
