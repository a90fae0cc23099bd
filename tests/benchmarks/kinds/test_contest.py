"""`--contest`: what is compared, by what bound, and what the record says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from benchmarks import cli
from benchmarks.cases import contests
from benchmarks.harness.runner import Bench
from benchmarks.harness.timing import Effort
from benchmarks.kinds import contest


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contestants' tensors."""
    for name in ("randn", "rand", "tensor", "full", "ones"):
        made = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, made=made, **k: made(*a, **{n: v for n, v in k.items() if n != "device"})
        )
    monkeypatch.setattr(contests, "SIZES_OF_8_BITS", ((64, 128, 64),))
    monkeypatch.setattr(contests, "LAYERS", {"small": (64, 8, 2, 64, 48)})


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("kind", contests.CONTESTS)
def test_all_compute_the_same(kind: str) -> None:
    """But for the bare product; and what is wrong is beyond the bound."""
    for each in itertools.islice(contests.CONTESTS[kind](3, 0), 5):
        ours, *_, eager = (run() for run in each.runs.values())
        torch.testing.assert_close(each.read(ours).float(), each.read(eager).float(), rtol=0.08, atol=0.05)
        assert set(each.ratios.values()) == set(each.runs) - {contests.OURS}
        assert each.part_of_bound() < 5  # on a CPU a product of experts is rounded before its epilogue
        found, changed = each.read(ours), dict(each.runs)
        changed[contests.OURS] = lambda found=found: found + 1  # type: ignore[misc]
        assert contests.Contest(each.name, changed, {}, each.exact).part_of_bound() > 5
        measured = contest.measure(each, Bench(torch.device("cpu"), Effort(rounds=1)))
        assert measured.keys() == {"us", *each.ratios} and measured["us"].keys() == each.runs.keys()


def test_usage() -> None:
    with pytest.raises(SystemExit):
        cli.main(["--contest", "no such"])
    assert cli.main(["--contest", "fp8", "--device", "cpu"]) == cli.USAGE


def test_the_figures() -> None:
    cases: dict[str, Any] = {
        "a": {"us": {"epigemm": 10.0, "grouped_mm": 20.0}, "vs_grouped_mm": 2.0},
        "b": {"us": {"epigemm": 10.0, "grouped_mm": 5.0}, "vs_grouped_mm": 0.5},
    }
    assert contest.geomeans(cases) == {"vs_grouped_mm": (1.0, 0.5)}
    shown = contest.table(cases)
    assert shown.columns == ("case", "us", "vs_grouped_mm") and shown.rows[1] == ["b", "10.0", "0.500"]
