"""Records of shards become one, if they are all parts of one run of one source on one kind of GPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.shards import Selection, Shard
from tests.benchmarks.models.test_figures import JOB, result
from tests.benchmarks.models.test_figures import record as models_record
from tools import merge_records
from tools.merge_records import Sanitized, merge_sanitized, merge_tests

ROOT = Path(__file__).parents[2]
NAMES = [f"tests/test_a.py::test_it[{index}]" for index in range(10)]
TREES = {"csrc": "a" * 40, "python": "b" * 40}


def record_of(index: int, count: int = 2) -> dict[str, Any]:
    """The record of a shard in which one test failed, and one was skipped."""
    shard = Shard(index, count)
    chosen = [name for name in NAMES if shard.takes(name)]
    return {
        "environment": {
            "gpu": {"name": "NVIDIA H200", "driver": f"580.{index}", "cuda": "13.0"},
            "torch": "2.13.0",
            "epigemm": {"version": "0.1.0"},
            "trees": {**TREES, "modified": False},
            "command": ["python", "-m", "pytest", "--shard", str(shard)],
        },
        "selection": Selection.of_names(NAMES, shard, len(chosen)).to_json(),
        "outcomes": {"passed": len(chosen) - 2, "failed": 1, "error": 0, "skipped": 1},
        "failed": [chosen[0]],
        "skipped": {"no reason": 1} if index == 1 else {"no reason": 1, "another": 2},
        "seconds": {"tests/test_a.py": 1.5 * index},
    }


def test_records_of_tests() -> None:
    shards = [record_of(2), record_of(1)]
    given = copy.deepcopy(shards)
    merged = merge_tests(shards)
    assert shards == given
    assert merged["outcomes"] == {"passed": 6, "failed": 2, "error": 0, "skipped": 2}
    assert merged["failed"] == [*given[1]["failed"], *given[0]["failed"]]
    assert merged["skipped"] == {"no reason": 2, "another": 2}
    assert merged["seconds"] == {"tests/test_a.py": 4.5}
    assert merged["environment"] == given[1]["environment"]
    assert merged["selection"] == {**given[0]["selection"], "shard": "1/1", "chosen": 10}
    assert [(each["shard"], each["command"][-1]) for each in merged["shards"]] == [
        ("1/2", "1/2"),
        ("2/2", "2/2"),
    ]


@pytest.mark.slow
def test_a_shard_of_the_suite(tmp_path: Path) -> None:
    """In a process of pytest-xdist's, where it is there: its record says which part of how many tests it is."""
    file, output = "tests/benchmarks/harness/test_shards.py", tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider", "--shard", "1/2"]
    command += ["--summary-json", str(output), "--trees", f"csrc={'a' * 40},python={'b' * 40}"]
    command += ["-n", "1"] if importlib.util.find_spec("xdist") else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    passed, selection = record["outcomes"]["passed"], record["selection"]
    assert 0 < passed == selection["chosen"] < selection["of"] and record["failed"] == []
    assert selection["shard"] == "1/2" and file in record["seconds"]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("environment", "trees", "csrc"), "c" * 40, "different sources: .*csrc"),
        (("environment", "trees", "python"), "c" * 40, "different sources: .*python"),
        (("environment", "gpu", "name"), "NVIDIA H100", "different sources: .*H100"),
        (("environment", "torch"), "2.12.0", "different sources: .*2.12"),
        (("environment", "epigemm", "version"), "0.2", "different sources: .*0.2"),
        (("environment", "trees", "modified"), True, "modified"),
        (("environment", "trees"), {}, "not known"),
        (("selection", "shard"), "1/2", "once"),
        (("selection", "digest"), "0", "different runs"),
        (("selection", "of"), 11, "different runs"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
def test_other_records_are_refused(place: tuple[str, ...], value: Any, words: str) -> None:
    shards = [record_of(1), record_of(2)]
    inner: Any = shards[1]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=words):
        merge_tests(shards)


# --- compute-sanitizer ------------------------------------------------------------------------------------------------

MEMCHECK, RACECHECK = (
    "ERROR SUMMARY: {} errors",
    "RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)",
)


def sanitized(index: int, verdict: str = MEMCHECK, errors: int = 0, tree: str = "a") -> str:
    shard = Shard(index, 2)
    selection = Selection.of_names(NAMES, shard, len(shard.part(NAMES)))
    return (
        "========= COMPUTE-SANITIZER\n"
        f"a line of shard {index}\n"
        f"trees: csrc {tree * 40}, python {'b' * 40}\n"
        f"shard {shard}: {selection.chosen} of {selection.of} jobs ({selection.digest})\n"
        f"{100 * index} launches, all within tolerance\n"
        f"========= {verdict.format(errors)}\n"
    )


@pytest.mark.parametrize("verdict", [MEMCHECK, RACECHECK])
def test_texts_of_compute_sanitizer(verdict: str) -> None:
    merged = merge_sanitized([sanitized(2, verdict, 3), sanitized(1, verdict, 1)])
    lines = merged.splitlines()
    assert lines[0] == "========= COMPUTE-SANITIZER" and lines[-1] == f"========= {verdict.format(4)}"
    assert lines[1:3] == ["a line of shard 1", "a line of shard 2"]
    assert lines[3] == f"trees: csrc {'a' * 40}, python {'b' * 40}"
    assert lines[4].startswith("shard 1/1: 10 of 10 jobs (")
    assert lines[5] == "300 launches, all within tolerance"
    assert Sanitized.parse(merged).text() == merged


def test_texts_that_do_not_belong_together() -> None:
    one, two = sanitized(1), sanitized(2)
    for texts, words in (
        ([one], "once"),
        ([one, one], "once"),
        ([one, sanitized(2, tree="c")], "different sources"),
        ([one, sanitized(2, RACECHECK)], "different sources"),
        ([one, two.replace("========= ERROR SUMMARY: 0 errors\n", "")], "SUMMARY"),  # cut by a time limit
        ([one, two.replace("all within tolerance", "")], "all within tolerance"),
        ([one, two.replace("trees:", "")], "trees"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_sanitized(texts)


# --- whole models -----------------------------------------------------------------------------------------------------


def models_of(turns: list[float], path: Path, **changes: Any) -> Path:
    outcome = result(turns, [1.0] * len(turns))
    path.write_text(json.dumps(models_record((JOB, "result", outcome), **changes)))
    return path


def test_records_of_models(tmp_path: Path) -> None:
    runs = [models_of([value], tmp_path / f"{value}.json") for value in (2.0, 3.0, 4.0)]
    merged = tmp_path / "summary.json"
    merge_records.main([*map(str, (merged, *runs))])
    found = json.loads(merged.read_text())
    assert found["cases"][str(JOB.case)]["eager_options_vs_eager"] == 3.0 and len(found["runs"]) == 3
    assert '"eager": [2.0, 3.0, 4.0]' in merged.read_text(), "a list of numbers is one line"
    text = (tmp_path / "tables.md").read_text()
    assert "3.000" in text and "## Geometric means" in text
    # What was merged can be merged.
    again = tmp_path / "again" / "summary.json"
    merge_records.main([*map(str, (again, merged, models_of([5.0], tmp_path / "5.json")))])
    found = json.loads(again.read_text())
    assert found["cases"][str(JOB.case)]["eager_options_vs_eager"] == 3.5 and len(found["runs"]) == 4
