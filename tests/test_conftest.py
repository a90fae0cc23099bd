"""The suite in shards, as a machine with GPUs runs it: each test once, and one record of all shards."""

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
    """The first shard in two processes of pytest-xdist's, the second one in one alone."""
    several = "2" if importlib.util.find_spec("xdist") else "0"
    records: dict[str, Any] = {}
    for shard, processes in (("1/2", several), ("2/2", "0")):
        file = tmp_path / "record.json"
        run("-n", processes, "--shard", shard, "--summary-json", str(file), "--trees", TREES)
        records[shard] = json.loads(file.read_text())
    one, two = records.values()
    passed, of = [each["outcomes"]["passed"] for each in (one, two)], one["selection"]["of"]
    assert min(passed) > 0 and sum(passed) == of > 8
    merged = merge_tests([two, one])
    assert merged["outcomes"] == one["outcomes"] | {"passed": of} and merged["failed"] == []
    assert merged["selection"] == one["selection"] | {"shard": "1/1", "chosen": of}


def test_what_is_no_shard() -> None:
    config: Any = SimpleNamespace(getoption=lambda name: "3/2")
    with pytest.raises(pytest.UsageError, match="--shard: expected I/N"):
        conftest.pytest_configure(config)
