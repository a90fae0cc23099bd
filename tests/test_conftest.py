"""The suite in shards, as a machine with GPUs runs it. tools/test_merge_records makes one record of all shards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]
FILE = "tests/benchmarks/harness/test_records.py"
TREES = f"csrc={'a' * 40},python={'b' * 40}"


@pytest.mark.slow
def test_a_shard_of_the_suite(tmp_path: Path) -> None:
    """In two processes of pytest-xdist's, where it is there: its record says which part of how many tests it is."""
    file, several = tmp_path / "record.json", "2" if importlib.util.find_spec("xdist") else "0"
    command = [sys.executable, "-m", "pytest", FILE, "-p", "no:cacheprovider", "-n", several]
    command += ["--shard", "1/2", "--summary-json", str(file), "--trees", TREES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    passed, of = record["outcomes"]["passed"], record["selection"]["of"]
    assert 0 < passed == record["selection"]["chosen"] < of and of > 8 and record["failed"] == []
    assert record["selection"]["shard"] == "1/2" and FILE in record["seconds"]


def test_what_is_no_shard() -> None:
    config: Any = SimpleNamespace(getoption=lambda name: "3/2")
    with pytest.raises(pytest.UsageError, match="--shard: expected I/N"):
        conftest.pytest_configure(config)
