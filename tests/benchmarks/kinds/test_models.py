"""`python -m benchmarks --models`: its processes and record, its budget, its list, that nothing wrong passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cli import main
from benchmarks.kinds import models
from benchmarks.models import figures
from benchmarks.models.registry import NETWORKS
from tests.benchmarks.models.test_figures import JOB, result

QUICK = ["--models", "--quick", "--device", "cpu"]
COMMAND = [*QUICK, "--cases", "nerf/fp32_highest/inference/2"]


@pytest.mark.slow
def test_a_run_through_its_processes(tmp_path: Path) -> None:
    variants = ["--variants", "eager_options", "overhead"]
    assert main([*COMMAND, *variants, "--output", str(tmp_path), "--time-budget", "600"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["schema"], summary["kind"], summary["complete"]) == (2, "models", True)
    assert summary["layers"] == {"nerf": NETWORKS["nerf"].layers}
    assert summary["skipped"] == {"nerf/fp32_highest/inference/2/overhead": "CUDA graphs need a GPU"}
    assert summary["failed"] == summary["not_reached"] == {} and summary["missed"] == []
    assert summary["selection"]["chosen"] == summary["selection"]["of"] == 2
    ((name, case),) = summary["cases"].items()
    assert name == "nerf/fp32_highest/inference/2" and case["right"]
    assert case["chains"]["taken"] == case["chains"]["followed"] == 11
    assert case["products"]["fused"] == case["products"]["all"] == 12
    turns = case["turns_ms"]["eager_options_vs_eager"]
    ratios = [eager / fuse for eager, fuse in zip(turns["eager"], turns["eager_options"], strict=True)]
    assert case["eager_options_vs_eager"] == pytest.approx(sum(ratios) / 2)
    for which in ("host_ms", "device_ms"):
        assert set(case[which]) == {"eager", "eager_options"} and min(case[which].values()) > 0
    text = (tmp_path / "tables.md").read_text()
    assert "## Geometric means" in text and "skipped: CUDA graphs need a GPU" in text


def test_without_time_nothing_is_reached(tmp_path: Path) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--time-budget", "0"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cases"] == {} and len(summary["not_reached"]) == len(models.DEFAULT)


def test_tables_of_what_is_there() -> None:
    found: dict[str, Any] = figures.empty()
    figures.add(found, JOB, "result", result([2.0, 1.9], [1.0, 1.0]))
    found |= figures.judged(found, quick=False)
    first, means = models.tables(found)
    assert first.title.startswith("eager_options_vs_eager") and means.title == "Geometric means"
    row = dict(zip(first.columns, first.rows[0], strict=True))
    assert row["case"] == str(JOB.case) and row["ratio"] == "1.950" and row["right"] == "yes"
    assert row["ms"] == "1.950, 1.000" and row["chains"] == "3 of 4"


def test_remarks_name_what_failed() -> None:
    found: dict[str, Any] = figures.empty()
    figures.add(found, JOB, "failed", "OutOfMemoryError")
    found |= figures.judged(found, quick=False)
    assert models.remarks(found) == [f"FAILED: OutOfMemoryError: {JOB}"]
