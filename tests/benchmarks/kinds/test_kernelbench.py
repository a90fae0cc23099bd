"""`python -m benchmarks --kernelbench`: its processes and record, its list and shards, records that become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cli import main
from benchmarks.kinds import kernelbench
from benchmarks.models import figures
from benchmarks.models.kernelbench import Problem, tree_hashes
from tests.benchmarks.models.test_figures import record as models_record
from tests.benchmarks.models.test_kernelbench import make_checkout

ONE, OTHER = (Problem(Path(f"level2/{name}.py")) for name in ("1_plain", "2_norm"))


def command(checkout: Path, *flags: str) -> list[str]:
    return ["--kernelbench", str(checkout), "--device", "cpu", *flags]


@pytest.mark.slow
def test_a_run_through_its_processes(tmp_path: Path) -> None:
    checkout, output = make_checkout(tmp_path / "checkout"), tmp_path / "output"
    flags = ["--cases", "level2/1*", "4_drop", "7_raises", "--output", str(output), "--time-budget", "600"]
    assert main(command(checkout, *flags)) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["schema"], summary["kind"], summary["complete"]) == (2, "kernelbench", True)
    assert summary["checkout"] == tree_hashes(checkout)
    assert summary["selection"]["chosen"] == summary["selection"]["of"] == 3
    assert summary["failed"] == summary["not_reached"] == {} and summary["wrong"] == []
    assert list(summary["skipped"]) == ["level2/7_raises"]
    assert set(summary["cases"]) == {"level2/1_plain", "level2/4_dropout"}
    case = summary["cases"]["level2/1_plain"]
    assert case["right"] and case["products"] == case["products_found"] == 1
    assert min(case[f"{way}_ms"] for way in ("eager", "compile", "fuse", "backend")) > 0
    for ratio in kernelbench.RATIOS:
        assert case[ratio] == case["quartiles"][ratio][1] > 0
    assert summary["geomeans"]["level2, products taken"]["fuse_vs_eager"]["problems"] == 2
    text = (output / "tables.md").read_text()
    assert "fails its own harness in eager: level2/4_dropout: eager: 6 of 6 trials" in text
    assert "skipped: fails its own harness in eager: RuntimeError" in text


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    checkout, output = make_checkout(tmp_path / "checkout"), tmp_path / "output"
    flags = ["--device", "cuda", "--cases", "level2/*", "--output", str(output)]
    assert main(["--kernelbench", str(checkout), *flags]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary["skipped"]) == {"level2/5_tuple", "level2/7_raises"}
    rights = {name.split("_")[1]: case["right"] for name, case in summary["cases"].items()}
    assert rights == {"plain": True, "norm": True, "state": True, "dropout": None, "cancels": True}
    assert all(ratio in case for case in summary["cases"].values() for ratio in kernelbench.RATIOS)


def result(ms: float = 1.0, **changes: Any) -> dict[str, Any]:
    turns = {"eager": [4.0], "compile": [3.0], "fuse": [ms], "backend": [ms]}
    found = {
        "products": 1,
        "products_found": 2,
        "right": True,
        "not_passed": {},
        "errors": {},
        "turns_ms": turns,
    }
    return found | changes


def record(*outcomes: tuple[Problem, str, Any], **changes: Any) -> dict[str, Any]:
    found = figures.empty()
    for outcome in outcomes:
        kernelbench.add(found, *outcome)
    about = {"kind": "kernelbench", "checkout": {"level2": "a" * 40}}
    return {**models_record(), **about, **found, **kernelbench.judged(found), **changes}


def test_ratios_and_their_means() -> None:
    other = result(2.0, products=0, turns_ms={"eager": [4.0], "compile": [3.0], "fuse": [2.0]})
    found = record((ONE, "result", result()), (OTHER, "result", other))
    assert (
        found["cases"][str(ONE)]["fuse_vs_eager"] == 4 and found["cases"][str(ONE)]["backend_vs_compile"] == 3
    )
    assert (
        "backend_vs_compile" not in found["cases"][str(OTHER)]
        and found["cases"][str(OTHER)]["compile_ms"] == 3
    )
    means = found["geomeans"]
    assert means["level2, products taken"]["fuse_vs_eager"] == {"problems": 1, "geomean": 4.0, "worst": 4.0}
    assert set(means["level2, nothing taken"]) == {"fuse_vs_eager"}
    first, second = kernelbench.tables(found)
    rows = [dict(zip(first.columns, row, strict=True)) for row in first.rows]
    assert [row["products"] for row in rows] == ["1 of 2", "0 of 2"]
    assert [row["backend_vs_compile"] for row in rows] == ["3.000", ""] and rows[0]["right"] == "yes"
    assert len(second.rows) == 3


def test_parts_become_one_record() -> None:
    parts = [
        record((ONE, "result", result()), (OTHER, "not_reached", "no time left")),
        record((OTHER, "result", result())),
    ]
    for order in (parts, parts[::-1]):
        merged = kernelbench.merge(order)
        assert set(merged["cases"]) == {str(ONE), str(OTHER)} and merged["not_reached"] == {}
        assert merged["geomeans"]["level2, products taken"]["fuse_vs_eager"]["problems"] == 2
    wrong = record((ONE, "result", result(right=False)))
    assert (
        kernelbench.merge([wrong, parts[0]])["wrong"]
        == kernelbench.merge([parts[0], wrong])["wrong"]
        == [str(ONE)]
    )
    assert kernelbench.merge([parts[0], record((ONE, "failed", "why"))])["failed"] == {str(ONE): "why"}
    assert kernelbench.merge([record((ONE, "failed", "why")), parts[0]])["failed"] == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkout": {"level2": "b" * 40}}, "different checkouts"),
        ({"kind": "models"}, "--kernelbench, got one of kind 'models'"),
    ],
)
def test_records_of_something_else_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernelbench.merge([record(), record(**changes)])
