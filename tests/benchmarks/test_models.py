"""`python -m benchmarks --models`: its processes and record, its budget, that nothing wrong passes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cli import main
from benchmarks.kinds import models as run
from benchmarks.kinds.models import bar, judged
from benchmarks.models import worker
from benchmarks.models.registry import NETWORKS, PRECISIONS
from benchmarks.models.worker import INFERENCE, TRAINING, Case, error, is_right

CPU = torch.device("cpu")
COMMAND = ["--models", "--quick", "--device", "cpu", "--cases", "t5-small/inference"]
LARGE = Case("bert-base", "fp32_highest", INFERENCE, (32, 128))


@pytest.mark.slow
def test_a_run_through_its_processes(tmp_path: Path) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--time-budget", "600"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["schema"], summary["kind"], summary["complete"]) == (2, "models", True)
    assert summary["layers"] == {"t5-small": NETWORKS["t5-small"].layers}
    assert set(summary["cases"]) == {f"t5-small/{name}/inference/2x128" for name in PRECISIONS}
    for case in summary["cases"].values():
        assert case["right"] and set(case["ms"]) == set(case["errors"])
        assert case["fuse_vs_eager"] == pytest.approx(case["ms"]["eager"] / case["ms"]["fuse"])
    assert summary["not_reached"] == summary["failed"] == {} and summary["missed"] == []
    assert "## Geometric means" in (tmp_path / "tables.md").read_text()


def test_without_time_nothing_is_reached(tmp_path: Path) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--time-budget", "0"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cases"] == {} and len(summary["not_reached"]) == len(PRECISIONS)


@pytest.mark.slow
def test_what_stops_early_measures_what_it_has() -> None:
    """A word while it compiles ends that after the present case."""
    stopped = run.Worker(f"t5-small/{INFERENCE}", CPU, quick=True)
    try:
        stopped.tell("stop")
        stopped.wait(time.monotonic() + 300)
        assert stopped.is_ready and not stopped.has_ended
        assert list(stopped.measure(time.monotonic() + 300)) == []
        assert not stopped.has_ended
    finally:
        stopped.end()


def test_the_error_is_the_worst_tensors() -> None:
    exact = [torch.ones(8), 2 * torch.ones(4)]
    assert error([t.clone() for t in exact], exact) == 0
    assert error([exact[0], 3 * torch.ones(4)], exact) == pytest.approx(0.5)
    for wrong in (
        exact[:1],
        [exact[0], 2 * torch.ones(1)],
        [torch.full((8,), math.nan), exact[1]],
        [exact[0], torch.full((4,), math.inf)],
    ):
        assert error(wrong, exact) == math.inf


def test_a_gradient_that_is_zero_is_held_to_the_largest() -> None:
    exact = [torch.full((8,), 1e-3), 1000 * torch.ones(4), torch.zeros(4)]
    assert error([*exact[:2], torch.full((4,), 0.25)], exact) == pytest.approx(0.25)
    assert error([2 * exact[0], *exact[1:]], exact) == pytest.approx(1.0)


def test_what_is_right() -> None:
    found = {"eager": 1e-6, "fuse": 1.4e-6, "compile": 1e-4, "backend": 1.4e-4}
    assert is_right(found)
    assert is_right(found | {"compile": 1e-9, "backend": 1.4e-6})
    for wrong in (
        {"fuse": 1.6e-6},
        {"backend": 1.6e-4},
        {"eager": math.inf, "fuse": math.inf},
        {"eager": math.inf},
    ):
        assert not is_right(found | wrong)


def test_gradients_behind_a_norm_are_more_than_noise() -> None:
    """A last LayerNorm makes the gradients of a plain sum vanish: nothing would be compared."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    inputs = (torch.randn(8, 16),)
    upstream = worker._upstream(model, inputs)
    _, weight, *_, last = worker._step(model, list(model.parameters()), inputs, upstream)()
    assert float(weight.norm()) > 0.01 * float(last.norm())


def result(fuse: float, backend: float, right: bool = True) -> dict[str, Any]:
    ms = dict.fromkeys(("eager", "fuse", "compile", "backend"), 1.0)
    return {"fuse_vs_eager": fuse, "backend_vs_compile": backend, "ms": ms, "errors": {}, "right": right}


def test_bars_and_what_the_record_says_of_them() -> None:
    found = {str(LARGE): result(1.5, 2.5), "bert-base/bf16/training/32x128": result(1.0, 1.0, False)}
    keys = [f"bert-base/{mode}" for mode in (INFERENCE, TRAINING)]
    figures = judged(keys, found, quick=False)
    assert figures["missed"] == [f"{LARGE}: fuse_vs_eager 1.500, wanted 2.0"]
    assert figures["wrong"] == ["bert-base/bf16/training/32x128"]
    assert figures["geomeans"]["fp32_highest/inference/large"]["backend_vs_compile"] == pytest.approx(2.5)
    small = Case("bert-base", "fp32_highest", INFERENCE, (8, 128))
    bf16 = Case("bert-base", "bf16", INFERENCE, (32, 128))
    assert (bar(small, "fuse_vs_eager"), bar(small, "backend_vs_compile")) == (0.99, 0.98)
    assert (bar(bf16, "fuse_vs_eager"), bar(bf16, "backend_vs_compile")) == (1.03, 0.98)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_most_telling_cases_come_first(network: str) -> None:
    first, second, *_ = worker.cases(f"{network}/{INFERENCE}", quick=False)
    assert (first.precision, second.precision) == ("fp32_highest", "bf16")
    assert first.is_large and second.is_large
    assert [c.precision for c in worker.cases(f"{network}/{TRAINING}", quick=False)] == [
        "fp32_highest",
        "bf16",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cases", "lstm"], "--cases: 'lstm' matches nothing; the models are: bert-base/inference, "),
        (["--sizes", "8x8x8"], "--models: goes without --sizes"),
        (["--dtypes", "bf16"], "--models: goes without --dtypes"),
        (["--peers", "eager"], "--models: goes without --peers"),
        (["--trees", "csrc=1"], "--trees: expected"),
    ],
)
def test_wrong_usage_is_explained(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *flags]) == 2
    assert said in capsys.readouterr().err
