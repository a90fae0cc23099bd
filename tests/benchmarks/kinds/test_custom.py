"""`python -m benchmarks --custom` at tiny sizes: its cases, its record, and that nothing wrong is timed.

A fake stands in for `epigemm.epilogue`: GEMM, then the function in fp32.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

import epigemm
from benchmarks import baselines
from benchmarks.baselines import BASELINES
from benchmarks.cases import COLUMN, MATRIX, ROW, SCALAR, Case, Setting, Shape, make_data
from benchmarks.cases import custom as cases
from benchmarks.cases.custom import SIZES
from benchmarks.cli import main
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.records import (
    BUILTIN,
    COMPILE,
    EAGER,
    OURS,
    QUACK,
    CaseResult,
    Group,
    Measurement,
    Timing,
)
from benchmarks.harness.report import Record
from benchmarks.kinds import Run, custom, first_call

CPU, SHAPE = torch.device("cpu"), Shape(6, 32, 24)
TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}
COMMAND = ["--custom", "--quick", "--device", "cpu", "--time-budget", "3600"]
BF16, FP32 = cases.SETTINGS
CASES = cases.problems()
TENSORS = (COLUMN, ROW, MATRIX)


class Fake:
    """What `epigemm.epilogue` returns, as far as the benchmark calls it."""

    error = 0.0

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.kinds = function, dict(inspect.get_annotations(function))

    def __call__(self, x: Tensor, weight: Any, *, out: Tensor, **operands: Any) -> Tensor:
        plain = weight.weight if isinstance(weight, epigemm.PackedWeight) else weight
        assert isinstance(weight, epigemm.PackedWeight) == (x.dtype == torch.float32)
        values = dict(operands)
        for name, value in operands.items():
            if self.kinds[name] == ROW:
                assert value.shape == x.shape[:-1]
                values[name] = value.unsqueeze(-1)
        wide = {n: v.float() if isinstance(v, Tensor) else v for n, v in values.items()}
        return out.copy_(self.function(F.linear(x, plain).float(), **wide) + self.error)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    fresh: type[Fake] = type("Fresh", (Fake,), {})
    monkeypatch.setattr(epigemm, "epilogue", fresh, raising=False)
    for kind in (*TENSORS, SCALAR):
        monkeypatch.setattr(epigemm, kind, kind, raising=False)
    cases.decorated.cache_clear()
    calls = {"bf16": 0.5, "fp32": 2.75}
    monkeypatch.setattr(
        first_call,
        "in_process",
        lambda dtype, *_: calls.pop(dtype) if dtype in calls else 0.0125,
    )
    return fresh


# --- the cases ------------------------------------------------------------------------------------------------


def test_at_least_twelve_epilogues_with_operands_of_every_kind() -> None:
    assert len(CASES) >= 12
    assert {o.kind for case in CASES.values() for o in case.operands.values()} == {*TENSORS, SCALAR}
    for name, case in CASES.items():
        assert case.function is not None
        assert ["acc", *case.operands] == list(inspect.signature(case.function).parameters), name


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_what_its_baselines_compute(name: str) -> None:
    """The bias inside ``F.linear`` or outside, the same result."""
    problem = CASES[name]
    data = make_data(Case(problem, SHAPE, FP32), CPU, 0)
    assert data.weight is not None and problem.function is not None
    expected = problem.function(F.linear(data.x, data.weight), **problem.values(data.parameters))
    assert expected.shape == (SHAPE.m, SHAPE.n)
    torch.testing.assert_close(problem.eager(data.x, data.weight, data.parameters), expected)
    for operand, given in zip(
        problem.operands.values(), problem.given(data.parameters).values(), strict=True
    ):
        shapes = {COLUMN: (SHAPE.n,), ROW: (SHAPE.m,), MATRIX: (SHAPE.m, SHAPE.n)}
        assert getattr(given, "shape", None) == shapes.get(operand.kind)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ([], [], ["bf16", "fp32"], "cuda"),
            [f"{name}/{size}" for size in SIZES for name in CASES for _ in range(2)],
        ),
        ((["bias_gelu"], [SHAPE], ["fp32"], "cpu"), [f"bias_gelu/{SHAPE}"]),
        ((["gelu", "tanh"], [SHAPE], ["bf16"], "cpu"), ["bias_gelu", "bias_gelu_tanh", "tanh"]),
    ],
)
def test_selection(arguments: tuple[Any, ...], names: list[str]) -> None:
    patterns, sizes, dtypes, device = arguments
    chosen = cases.select(patterns, sizes, dtypes, torch.device(device))
    found = [f"{case.problem.epilogue}/{case.shape}" for case in chosen]
    assert found == [name if "/" in name else f"{name}/{SHAPE}" for name in names]


# --- the record -----------------------------------------------------------------------------------------------


def run_in(folder: Path, *more: str) -> int:
    trees = ",".join(f"{name}={tree}" for name, tree in TREES.items())
    return main([*COMMAND, "--trees", trees, "--sizes", str(SHAPE), "--output", str(folder), *more])


def check_summary(summary: dict[str, Any], names: list[str]) -> None:
    assert (summary["kind"], summary["schema"], summary["complete"]) == ("custom", 2, True)
    assert {name: summary[name] for name in TREES} == TREES
    assert summary["torch"] == torch.__version__ and summary["command"].startswith("python -m benchmarks")
    assert list(summary["cases"]) == [f"{name}/{SHAPE}" for name in names]
    for name, ratios in summary["cases"].items():
        wanted = {"fp32_vs_best", "bf16_vs_bare", "bf16_vs_best"}
        if CASES[name.partition("/")[0]].ours:
            wanted |= {"fp32_vs_builtin", "bf16_vs_builtin"}
        assert set(ratios) == wanted
        assert all(ratio > 0 for ratio in ratios.values())
        for dtype, times in summary["ms"][name].items():
            assert {OURS, EAGER, "mm"} <= set(times)
            assert summary["best"][name][dtype] == EAGER
    assert list(summary["first_call_s"]) == list(summary["cached_call_ms"]) == ["bf16", "fp32"]
    assert set(summary["absent"]) == {"compile", "quack"}
    assert list(summary["not_run"]) == ["max_autotune"]


def test_the_record_of_a_run(fake: type[Fake], tmp_path: Path) -> None:
    assert run_in(tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    check_summary(summary, list(CASES))
    assert summary["first_call_s"] == {"bf16": 0.5, "fp32": 2.75}
    assert summary["cached_call_ms"] == {"bf16": 12.5, "fp32": 12.5}
    text = (tmp_path / "tables.md").read_text()
    for table in custom.tables(summary):
        assert table.markdown() in text


def test_the_record_of_a_run_of_the_real_one(tmp_path: Path) -> None:
    cases.decorated.cache_clear()
    assert run_in(tmp_path, "--cases", "bias_relu", "dequantise", "clamp") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    check_summary(summary, ["bias_relu", "dequantise", "clamp"])
    assert all(value > 0 for key in ("first_call_s", "cached_call_ms") for value in summary[key].values())


def test_what_the_time_budget_cuts_is_named(fake: type[Fake], tmp_path: Path) -> None:
    assert run_in(tmp_path, "--time-budget", "0", "--cases", "tanh") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cases"] == {} and summary["complete"] is True
    for name in (OURS, EAGER):
        (reason,) = summary["not_run"][name]
        assert reason == "not run: the time budget of 0 s was spent"
        assert len(summary["not_run"][name][reason]) == 2


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_wrong_result_has_no_figures(
    error: float, fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.error = error
    assert run_in(tmp_path, "--cases", "bias_silu") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["wrong"]) == 2 and summary["cases"] == {}
    assert not any(OURS in times for times in summary["ms"][f"bias_silu/{SHAPE}"].values())
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "no_such"], "--cases: 'no_such' matches nothing"),
        (["--sizes", "8x8"], "--sizes: --custom takes MxNxK"),
        (["--layers", "--sizes", "8x8x8"], "--layers: goes without --sizes"),
        (["--dtypes", "fp16"], "--dtypes: --custom takes bf16 and fp32, got fp16"),
        (["--peers", "nobody"], "peers: got 'nobody'"),
        (["--models"], "--custom: goes without --models"),
    ],
)
def test_wrong_usage_exits_with_two(
    arguments: list[str], message: str, fake: type[Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err


# --- the first call -------------------------------------------------------------------------------------------


def test_each_dtype_has_a_cache_of_its_own_empty_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, bool]] = []

    def in_process(dtype: str, shape: object, device: object, cache: str, alternative: str) -> float:
        kept = Path(cache) / "kept"
        seen.append((dtype, cache, kept.exists()))
        kept.touch()
        return 1.0

    monkeypatch.setattr(first_call, "in_process", in_process)
    first_call.measure(["bf16", "fp32"], None, CPU)
    assert [(dtype, full) for dtype, _, full in seen] == [
        ("bf16", False),
        ("bf16", True),
        ("fp32", False),
        ("fp32", True),
    ]
    assert len({cache for _, cache, _ in seen}) == 2 and not any(Path(cache).exists() for _, cache, _ in seen)


def test_the_first_call_of_torch_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is timed where it takes part, with caches of its own. No case is measured here."""
    seen: list[tuple[str, str]] = []

    def in_process(dtype: str, shape: object, device: object, cache: str, alternative: str) -> float:
        seen.append((alternative, cache))
        return {OURS: 0.5, COMPILE: 3.0}[alternative]

    def measure(run: Run, record: Record, *_: object, **__: object) -> bool:
        record.figures |= {**custom.figures([]), "wrong": {}}
        return False

    monkeypatch.setattr(first_call, "in_process", in_process)
    monkeypatch.setattr(Run, "baselines", lambda *_: ([BASELINES[OURS], BASELINES[COMPILE]], {}))
    monkeypatch.setattr(Run, "measure", measure)
    assert run_in(tmp_path, "--cases", "bias_relu", "--dtypes", "bf16") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["first_call_s"], summary["compile_first_call_s"]) == ({"bf16": 0.5}, {"bf16": 3.0})
    assert summary["compile_cached_call_ms"] == {"bf16": 3000.0}
    assert "| torch.compile | bf16 | 3.000 | 3000.0 |" in (tmp_path / "tables.md").read_text()
    assert [name for name, _ in seen] == [OURS, OURS, COMPILE, COMPILE]
    assert len({cache for _, cache in seen}) == 2


# --- the figures, against numbers worked out by hand -----------------------------------------------------------


def result(setting: Setting, times: dict[str, float]) -> CaseResult:
    found = CaseResult.of(Case(CASES["bias_relu"], SHAPE, setting))
    measured = [Measurement(name, name, in_turn=Timing.of([ms])) for name, ms in times.items()]
    found.groups.append(Group("any", measured))
    return found


def test_the_figures_of_both_dtypes() -> None:
    measured = [
        result(BF16, {OURS: 2.0, BUILTIN: 2.1, EAGER: 4.0, "mm": 1.8, "max_autotune": 2.5, "quack": 2.6}),
        result(FP32, {OURS: 1.0, EAGER: 4.5, "mm": 4.0, "compile": 4.25}),
    ]
    name, found = f"bias_relu/{SHAPE}", custom.figures(measured)
    ratios = {"bf16_vs_bare": 0.9, "bf16_vs_best": 1.25, "bf16_vs_builtin": 1.05, "fp32_vs_best": 4.25}
    ratios["bf16_vs_quack"] = 1.3
    assert found["cases"] == {name: ratios}
    assert found["best"] == {name: {"bf16": "max_autotune", "fp32": "compile"}}


def test_what_misses_its_mark() -> None:
    summary = {
        "cases": {
            f"gate/{SIZES[0]}": {"fp32_vs_best": 3.9, "bf16_vs_best": 1.0},
            f"gate/{SIZES[2]}": {"fp32_vs_best": 3.9, "bf16_vs_best": 0.98, "bf16_vs_builtin": 0.995},
            f"tanh/{SIZES[1]}": {"fp32_vs_best": 4.0, "fp32_vs_builtin": 0.98},
        },
        "first_call_s": {"bf16": 1.6, "fp32": 2.4},
        "cached_call_ms": {"bf16": 50.0, "fp32": 51.0},
    }
    assert custom.missed(summary) == [
        f"gate/{SIZES[0]}: fp32_vs_best is 3.900, wanted 4",
        f"gate/{SIZES[2]}: bf16_vs_best is 0.980, wanted 1",
        f"tanh/{SIZES[1]}: fp32_vs_builtin is 0.980, wanted 0.99",
        "first call, bf16: 1.60 s, wanted 1.5",
        "first call from the cache, fp32: 51.0 ms, wanted 50",
    ]


def test_layers_are_held_to_the_bare_product() -> None:
    """16-bit ones alone, of the epilogues that have bars."""
    measured = [
        result(BF16, {OURS: 0.1, EAGER: 0.2, "mm": 0.08}),
        result(BF16, {OURS: 0.01, EAGER: 0.02}),
        result(FP32, {OURS: 0.1, EAGER: 0.2, "mm": 0.08}),
    ]
    found = custom.layer_figures(measured, multiprocessors=0)
    assert list(found["layers"]) == ["bias_relu/bf16"] and found["layers"]["bias_relu/bf16"]["points"] == 1
    summary = {**found, "first_call_s": {}, "cached_call_ms": {}}
    lines = [line for line in custom.missed(summary) if line.startswith("bias_relu/bf16: ")]
    assert len(lines) == 2 and f"bias_relu/bf16: {SHAPE}: 0.800 of the bare product" in lines[1]
    assert custom.tables(summary)[-1].rows[0][0] == "bias_relu/bf16"
    assert "layers" not in custom.figures(measured)


def test_layers_are_what_the_target_speaks_of() -> None:
    """Twenty layers with K from 256 to 1024 and M from 500 to 50000, none of them twice."""
    shapes = set(cases.LAYERS.values())
    assert len(shapes) == len(cases.LAYERS) == 20
    assert all(256 <= (shape.k or 0) <= 1024 and 500 <= shape.m <= 50000 for shape in shapes)


# --- QuACK ------------------------------------------------------------------------------------------------------------


class FakeQuack:
    """`quack.gemm_interface` as far as it is called, with the names that its release 0.6.4 has."""

    activations: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "relu": torch.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
        "gelu_erf": F.gelu,
        "gelu_tanh_approx": functools.partial(F.gelu, approximate="tanh"),
    }

    def gemm_act(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        postact_out: Tensor,
        store_preact: bool = True,
        tuned: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        assert C is None and not store_preact and activation is not None
        z = A.float() @ B.float() + (0 if bias is None else bias.float())
        return None, postact_out.copy_(self.activations[activation](z))

    def gemm_add(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        tuned: bool = True,
    ) -> Tensor:
        assert out is not None and bias is not None
        return out.copy_(A.float() @ B.float() + C.float() + bias.float())


@pytest.mark.parametrize("name", [name for name, problem in CASES.items() if problem.quack])
def test_quack_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every epilogue that it has a function for: ReLU and both GELUs among them."""
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", FakeQuack())
    case = Case(CASES[name], SHAPE, BF16)
    quack = BASELINES[QUACK]
    assert not quack.absent() and not quack.applies(case, torch.device("cuda"))
    assert quack.applies(Case(CASES[name], SHAPE, FP32), torch.device("cuda")) == "16-bit only"
    data = make_data(case, CPU, 0)
    out = torch.empty(SHAPE.m, SHAPE.n, dtype=torch.bfloat16)
    found = quack.prepare(case, data, out).run()
    assert found is out
    assert Reference(case, data, 0).compare(found, 0).ok


def test_quack_that_is_not_there_is_absent() -> None:
    """`quack` on the command line leaves the product and eager out; its record says why it has no times."""
    assert {name for name, problem in CASES.items() if problem.quack} >= {"bias_relu", "bias_gelu_tanh"}
    with mock.patch.dict(sys.modules, {"quack.gemm_interface": None}):
        found, absent = baselines.select(baselines.of_kind("custom"), [QUACK], [])
    assert [baseline.name for baseline in found] == [OURS]
    assert absent[QUACK].startswith("quack.gemm_interface does not import: ModuleNotFoundError")
