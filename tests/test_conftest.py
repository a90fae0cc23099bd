"""The suite in shards, as a machine with GPUs runs it: each test once, and one record of all shards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.merge_records import merge_tests

ROOT = Path(__file__).parents[1]
FILE = "tests/benchmarks/harness/test_records.py"
TREES = f"csrc={'a' * 40},python={'b' * 40}"


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", FILE, "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_shards_of_the_suite(tmp_path: Path) -> None:
    """The first shard in two processes of pytest-xdist's, the whole and the second shard in one alone."""
    several = "2" if importlib.util.find_spec("xdist") else "0"
    records: dict[str, Any] = {}
    for shard, processes in (("1/1", "0"), ("1/2", several), ("2/2", "0")):
        file = tmp_path / "record.json"
        run("-n", processes, "--shard", shard, "--summary-json", str(file), "--trees", TREES)
        records[shard] = json.loads(file.read_text())
    whole, one, two = records.values()
    assert whole["outcomes"]["passed"] == whole["selection"]["of"] > 8
    assert 0 < one["outcomes"]["passed"] < whole["outcomes"]["passed"]
    merged = merge_tests([two, one])
    assert {name: merged[name] for name in ("outcomes", "failed", "skipped", "selection")} == {
        name: whole[name] for name in ("outcomes", "failed", "skipped", "selection")
    }


def test_what_is_no_shard() -> None:
    command = [sys.executable, "-m", "pytest", FILE, "--collect-only", "--shard", "3/2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4 and "--shard: expected I/N" in done.stderr
