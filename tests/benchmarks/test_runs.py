"""`python -m benchmarks`, one run of each kind at toy sizes: its record, its files, and that nothing wrong passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

import epigemm
from benchmarks.baselines import BASELINES, Alternative
from benchmarks.cases import Case, Data, Setting, Shape
from benchmarks.cases import host as host_cases
from benchmarks.cases.problems import problems
from benchmarks.cli import main, parser
from benchmarks.harness import environment
from benchmarks.harness.records import EAGER, OURS
from benchmarks.kinds import Run, bench

FP32 = Setting("fp32", "highest")
TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}
ALWAYS = ["--device", "cpu", "--trees", ",".join(f"{name}={tree}" for name, tree in TREES.items())]


class Kind(NamedTuple):
    """Of a record: the command, the folder in the output's, the cases, and what each of our calls is compared with."""

    command: str
    cases: set[str]
    beside: tuple[str, ...] = ()
    folder: str = ""
    skipped: tuple[str, ...] = ()


# Of each the first two shapes are small.
SEED, SHORT = 1272, 7032
BENCH = [
    "linear/bias_relu 8x16x24",
    "linear/scale_batch_norm 8x16x24",
    "linear/scale_batch_norm:train 8x16x24",
]
BENCH += ["elementwise/bias_relu 8x32", "elementwise/scale_batch_norm 8x32", "custom/bias_relu 8x16x24"]
BENCH += ["custom/clamp 8x16x24", "glu/gelu 8x16x24"]
KINDS = {
    "bench": Kind(
        "--quick --dtypes fp32 --peers builtin eager mm --sizes 8x16x24 8x32 --cases linear/bias_relu "
        "elementwise/bias_relu scale_batch_norm custom/bias_relu custom/clamp glu/gelu",
        {f"{name} fp32 highest" for name in BENCH},
        ("eager",),
    ),
    "random": Kind(
        f"--random {SEED} --count 2 --time-budget 600 --cases bias_relu/bf16 highest",
        {"bias_relu/bf16", "bias_relu/fp32_highest_plain"},
        ("eager", "mm"),
        f"random-{SEED}",
        ("bias_relu/fp32_highest_packed",),
    ),
    "short": Kind(
        f"--random {SHORT} --short --count 2 --time-budget 600 --cases residual/bf16 bias_gelu_tanh/fp16",
        {"residual/bf16", "bias_gelu_tanh/fp16"},
        ("eager", "mm"),
        f"short-{SHORT}",
    ),
    "host": Kind(
        "--host --quick --sizes 4x8x16", {*host_cases.CASES} - {"compiled/bf16"}, skipped=("compiled/bf16",)
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)
of_results = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.beside])
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Of a kind's run, which is made once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            assert main([*KINDS[kind].command.split(), *ALWAYS, "--output", str(path)]) == 0
            made[kind] = path / KINDS[kind].folder
        return made[kind]

    return of


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@kinds
def test_the_summary(kind: str, folder: Folders) -> None:
    """What was measured, where, and from which source."""
    found = read(folder(kind), "summary")
    assert (found["schema"], found["kind"], found["complete"]) == (2, kind, True)
    assert {name: found[name] for name in TREES} == TREES
    assert (found["gpu"], found["cuda"], found["driver"]) == ("", "", "")
    assert found["torch"] == torch.__version__ and found["epigemm"] == epigemm.build_info()
    assert found["command"].startswith("python -m benchmarks")
    assert set(found["cases"]) == KINDS[kind].cases
    assert set(found.get("skipped", ())) == {*KINDS[kind].skipped}
    assert not found.get("missed") or kind == "random"
    assert not any(case.get("wrong") for case in found["cases"].values()) and not found.get("wrong")


@kinds
def test_the_tables(kind: str, folder: Folders) -> None:
    text = (folder(kind) / "tables.md").read_text()
    assert all(name in text for name in (*KINDS[kind].cases, *KINDS[kind].skipped))
    pictures = [*folder(kind).glob("*.png")]
    assert bool(pictures) == (kind == "bench")
    assert all(each.read_bytes().startswith(b"\x89PNG") and each.stat().st_size > 5000 for each in pictures)


@of_results
def test_the_record_of_all_turns(kind: str, folder: Folders) -> None:
    record = read(folder(kind), "record")
    assert record["schema"] == 2 and record["complete"] and record["environment"]["trees"] == TREES
    assert record["environment"]["device"] == "cpu" and record["environment"]["gpu"] is None
    for case in record["cases"]:
        assert case["bytes"] > 0 and case["formula"] and len(case["groups"]) in (1, 3)
        for measurement in (each for group in case["groups"] for each in group["measurements"]):
            name, timing = measurement["alternative"], measurement["in_turn"]
            is_ours = name.startswith("epigemm")
            assert measurement["error"] == "" and bool(measurement["kernel"]) == (
                is_ours or name == "builtin"
            )
            assert 0 < timing["min_ms"] <= timing["q1_ms"] <= timing["median_ms"] <= timing["q3_ms"]
            assert bool(measurement["accuracy"]) == (is_ours or (kind == "bench" and name != "mm"))
            for accuracy in measurement["accuracy"].values():
                assert accuracy["ok"] is True and accuracy["wrong_elements"] == 0
        alternatives = {each["alternative"] for each in case["groups"][0]["measurements"]}
        assert {*KINDS[kind].beside} <= alternatives and any(
            name.startswith("epigemm") for name in alternatives
        )
        assert ("builtin" in alternatives) == case["case"].startswith("custom/bias_relu")


def test_ratios_are_of_the_times_of_the_record(folder: Folders) -> None:
    figures = read(folder("bench"), "summary")["cases"]
    for case in read(folder("bench"), "record")["cases"]:
        (group,), found = case["groups"], figures[case["case"]]
        times = {each["alternative"]: each["in_turn"]["median_ms"] for each in group["measurements"]}
        assert found["ms"] == pytest.approx(times, abs=1e-5)
        wanted = {"vs_eager": times["eager"] / times["epigemm"]}
        if "mm" in times:
            wanted["vs_bare"] = times["mm"] / times["epigemm"]
            wanted["eager_vs_bare"] = times["mm"] / times["eager"]
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("mistake", ["an element", "infinite", "not written", "nothing written", "raises"])
def test_a_wrong_result_fails_the_run(mistake: str, tmp_path: Path) -> None:
    ours = BASELINES[OURS]

    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        right = ours.prepare(case, data, out)

        def wrong() -> Tensor:
            if mistake == "raises":
                raise RuntimeError("deliberately broken")
            if mistake != "nothing written":
                right.run()
            if mistake == "an element":
                out.view(-1)[-1] += 1.0
            elif mistake in ("infinite", "not written"):
                out.view(-1)[-1] = float("inf" if mistake == "infinite" else "nan")
            return out

        return replace(right, run=wrong)

    device, flags = torch.device("cpu"), ["--quick", *ALWAYS, "--output", str(tmp_path)]
    run = Run(parser().parse_args(flags), device, environment.describe(device, ALWAYS[-1]))
    case = Case(next(each for each in problems() if each.name == "elementwise/bias_relu"), Shape(8, 32), FP32)
    record, baselines = run.record("bench", "", {}), [replace(ours, prepare=prepare), BASELINES[EAGER]]
    assert run.measure(record, run.bench(), [case], baselines, bench.figures)
    (result,) = record.results
    assert result.failure() and not result.measurements[OURS].in_turn and result.measurements[EAGER].in_turn
    assert result.case in bench.failures(record)[0]
