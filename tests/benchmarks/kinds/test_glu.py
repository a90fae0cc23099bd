"""`python -m benchmarks --glu`: its layers, its bound, its record at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Case, Setting, Shape, make_data
from benchmarks.cases import glu as cases
from benchmarks.cli import main
from benchmarks.harness.pairs import PairReference
from benchmarks.harness.records import COMPILE, EAGER, MM, OURS, CaseResult, Group, Measurement, Timing
from benchmarks.kinds import glu
from epigemm.tuning.timing import Effort

CPU, SHAPE = torch.device("cpu"), Shape(6, 32, 24)
TREES = "csrc=" + "a" * 40 + ",python=" + "0123456789" * 4
COMMAND = ["--glu", "--quick", "--device", "cpu", "--trees", TREES]
GPU = torch.device("cuda")


def case_of(activation: str, dtype: str) -> Case:
    return Case(cases.problems()[activation], SHAPE, Setting(dtype, "highest"))


def test_which_layers() -> None:
    every = cases.select([], [], ["bf16", "fp32"], GPU)
    assert len(every) == 2 * len(cases.LAYERS) and all(case.shape.n % 2 == 0 for case in every)
    assert len({case.name for case in every}) == len(every)
    chosen = cases.select(["Llama-3 8B"], [], ["bf16"], GPU)
    assert [case.models for case in chosen] == [("Llama-3 8B, 4096 tokens",)]
    (own,) = cases.select([], [Shape(128, 512, 64)], ["fp32"], GPU)
    assert own.name == "glu/silu 128x512x64 fp32 highest"


@pytest.mark.parametrize(
    "arguments",
    [["--sizes", "16x33x48"], ["--sizes", "16x32"], ["--cases", "none"], ["--dtypes", "fp16"], ["--layers"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main([*COMMAND, *arguments])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2 and "--" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_the_bound(activation: str, dtype: str) -> None:
    """PyTorch's own result is within it; a half in the other's place, a tenth of a percent and a NaN are not."""
    case = case_of(activation, dtype)
    data = make_data(case, CPU, 0)
    data.refill(signed=True, seed=1)
    assert data.weight is not None
    reference = PairReference(case, data, 0)
    right = case.problem.eager(data.x, data.weight, data.parameters)
    assert reference.compare(right, 3).ok
    first, second = F.linear(data.x, data.weight).chunk(2, -1)
    turned = cases.ACTIVATIONS[activation](second) * first
    off = right * (1.001 if dtype == "fp32" else 1.05)
    poisoned = right.clone()
    poisoned[0, 0] = float("nan")
    for wrong in (turned, off, poisoned, right[:, :-1]):
        assert not reference.compare(wrong, 3).ok


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ours(dtype: str) -> None:
    """Of views of the one weight; it writes to `out`, and is right."""
    case = case_of("gelu", dtype)
    data, bench = make_data(case, CPU, 0), glu.PairBench(CPU, Effort(rounds=1))
    out = bench.new_out(case)
    assert out.shape == (6, 16)
    alternative = glu.ours(case, data, out)
    assert alternative.run() is out and alternative.kernel == "torch"
    assert bench.reference(case, data).compare(out, alternative.roundings).ok


def test_the_record(tmp_path: Path) -> None:
    assert main([*COMMAND, "--sizes", "6x32x24", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["cases"]) == {f"glu/silu 6x32x24 {name}" for name in ("bf16", "fp32 highest")}
    for found in summary["cases"].values():
        assert {OURS, MM, EAGER} <= set(found["ms"]) and found["vs_eager"] > 0
    assert set(summary["geomeans"]) == {"bf16", "fp32"} and not summary["wrong"]
    assert "linear_glu" in (tmp_path / "record.json").read_text()


def result(shape: Shape, **ms: float) -> CaseResult:
    found = CaseResult.of(Case(cases.problems()["silu"], shape, Setting("bf16", "highest")))
    times = [Measurement(name, name, in_turn=Timing.of([value])) for name, value in ms.items()]
    found.groups.append(Group("main", times))
    return found


def test_what_is_missed() -> None:
    results = [result(Shape(m, 64, 32), **{OURS: 1.0, COMPILE: time}) for m, time in ((8, 1.0), (16, 1.44))]
    figures = glu.figures(results)
    assert figures["geomeans"]["bf16"]["vs_compile"] == pytest.approx(1.2) and not glu.missed(figures)
    slower = glu.figures([*results, result(Shape(32, 64, 32), **{OURS: 1.0, COMPILE: 0.8})])
    assert glu.missed(slower) == ["missed: bf16: vs_compile is 1.048 in geomean, wanted 1.1"]
