"""``--redraw``: records are read as they were written, and the figures beside them are of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cli import main
from benchmarks.harness import plots
from benchmarks.harness.records import CaseResult
from benchmarks.harness.report import finite
from benchmarks.kinds import redraw

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RECORDS = list(redraw.records(RESULTS))


def test_there_are_records() -> None:
    assert {path.name for path in RECORDS} == {"record.json", "gradings.json"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: str(path.parent.relative_to(RESULTS)))
def test_figures_are_of_their_record(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command would draw; `python -m benchmarks --redraw benchmarks/results` draws it."""
    drawn: dict[Path, str] = {}

    def look(figure: Any, path: Path) -> Path:
        drawn[path] = plots.content(figure)
        plots.pyplot().close(figure)
        return path

    monkeypatch.setattr(plots, "save", look)
    redraw.redraw(record, record.parent)
    assert drawn == {path: plots.content_of(path) for path in record.parent.glob("*.png")}


def test_every_figure_is_small_and_has_a_record() -> None:
    paths = list(RESULTS.rglob("*.png"))
    assert {path.parent for path in paths} == {path.parent for path in RECORDS}
    assert not [path for path in paths if path.stat().st_size > 100_000]


@pytest.mark.parametrize("record", [path for path in RECORDS if path.name == "record.json"][:1])
def test_a_case_is_read_as_it_was_written(record: Path) -> None:
    for plain in json.loads(record.read_text())["cases"]:
        assert finite(dataclasses.asdict(CaseResult.loaded(plain))) == plain


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RESULTS / "nvidia-h200" / "fp32"
    assert main(["--redraw", str(record), "--output", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in record.glob("*.png"))
    assert "wrote" in capsys.readouterr().out


def test_a_folder_without_a_record_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text('{"kind": "custom", "cases": []}')
    assert main(["--redraw", str(tmp_path)]) == 2
    assert "no record.json or gradings.json with figures" in capsys.readouterr().err
