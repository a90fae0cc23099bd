"""`python -m epigemm.bench --host` at tiny sizes: the record, its files and its ratios."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from epigemm.bench import host
from epigemm.bench.cases import Shape
from epigemm.bench.cli import main
from epigemm.bench.timing import Run, make_timer

TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host")
    trees = ",".join(f"{name}={tree}" for name, tree in TREES.items())
    command = ["--host", "--quick", "--device", "cpu", "--sizes", "4x8x16", "--trees", trees]
    assert main([*command, "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def record(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "host.json").read_text())
    return loaded


def test_record_says_what_was_measured_and_where(record: dict[str, Any]) -> None:
    assert record["kind"] == "host" and record["shape"] == [4, 8, 16]
    assert record["environment"]["trees"] == TREES and record["environment"]["torch"] == torch.__version__
    names = [case["case"] for case in record["cases"]]
    assert len(set(names)) == len(names)
    for part in (
        "bf16",
        "highest, plain",
        "highest, packed",
        "high, plain",
        "high, packed",
        "sigmoid",
        "bias_relu",
    ):
        assert any(part in name for name in names), part
    assert {variant for case in record["cases"] for variant in case["host"]} == set(host.VARIANTS)


def test_times_and_ratios_agree(record: dict[str, Any]) -> None:
    for case in record["cases"]:
        times = case["host"]
        assert {host.TORCH, host.CHAIN, host.FUNCTION, host.WITH_OUT} <= set(times)
        for name, timing in times.items():
            assert 0 < timing["min_ms"] <= timing["median_ms"] and timing["samples"] == 3
            ratio = timing["median_ms"] / times[host.TORCH]["median_ms"]
            assert math.isclose(case["times_torch"][name], ratio)
            assert math.isclose(
                case["times_chain"][name], timing["median_ms"] / times[host.CHAIN]["median_ms"]
            )


def test_markdown_has_every_case(folder: Path, record: dict[str, Any]) -> None:
    text = (folder / "host.md").read_text()
    assert text == host.markdown(record)
    for case in record["cases"]:
        median = f"{1e3 * case['host'][host.FUNCTION]['median_ms']:.1f}"
        assert any(case["case"] in line and median in line for line in text.splitlines())


def test_variants_compute_the_same() -> None:
    """All but torch's single operator, which leaves the epilogue out."""
    device = torch.device("cpu")
    shape = Shape(4, 8, 16)
    for make in (host._linear_cases, host._elementwise_cases):
        for case in make(shape, device):
            expected = case.runs[host.CHAIN]()
            for name, run in case.runs.items():
                if name != host.TORCH:
                    torch.testing.assert_close(
                        run(), expected, rtol=2e-2, atol=2e-2, msg=f"{case.name}: {name}"
                    )


def test_each_turn_makes_its_calls() -> None:
    made: list[str] = []
    x = torch.zeros(2)

    def call(name: str) -> Run:
        def run() -> torch.Tensor:
            made.append(name)
            return x

        return run

    case = host.HostCase("any", "none", {host.TORCH: call("a"), host.CHAIN: call("b")})
    timings = host.measure(case, host.HostEffort(turns=2, calls=3), make_timer(torch.device("cpu")))
    assert made == 3 * (["a"] * 3 + ["b"] * 3)  # the first round warms up
    assert {name: timing.samples for name, timing in timings.items()} == {host.TORCH: 2, host.CHAIN: 2}


@pytest.mark.parametrize("sizes", [["8x8"], ["4x8x16", "8x8x8"]])
def test_one_matrix_product_is_measured(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "--quick", "--device", "cpu", "--sizes", *sizes]) == 2
    assert "--host: takes one size, MxNxK" in capsys.readouterr().err
