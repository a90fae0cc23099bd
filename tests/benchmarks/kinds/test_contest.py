"""`--contest`: what is compared, by what bound, and what the record says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.cases import contests, experts
from benchmarks.cases.contests import Contest
from benchmarks.harness.runner import Bench
from benchmarks.harness.timing import Effort
from benchmarks.kinds import contest

CPU = torch.device("cpu")
LAYER = experts.Layer("", 24, 6, 2, 64, 32)
SMALL: dict[str, Callable[[torch.device], Contest]] = {
    "blocks": lambda device: contests.swiglu_to_blocks(64, 128, 64, device),
    "experts": lambda device: experts.swiglu_of_experts("", [30, 0, 66, 32], 48, 64, device),
    "experts in fp32": lambda device: experts.product_of_experts("", [30, 0, 66, 32], 48, 64, device),
    "block": lambda device: contests.quantised_block(48, 512, 256, "row", device),
    **{
        f"{recipe} {sums}": partial(lambda *of: contests.gelu_of_8_bits(64, 128, 64, *of), recipe, sums)
        for recipe, sums in itertools.product(("tensor", "rows"), ("fast", "promoted"))
    },
}

if experts.HAS_TRANSFORMERS:
    SMALL["layer"] = lambda device: experts.layer_of_experts(LAYER, device)
    SMALL["training"] = lambda device: experts.step_of_experts(LAYER, device)


@pytest.mark.parametrize("kind", SMALL)
def test_all_compute_the_same(kind: str) -> None:
    """But for the bare product; and what is wrong is beyond the bound."""
    each = SMALL[kind](CPU)
    ours, *_, eager = (run() for run in each.runs.values())
    torch.testing.assert_close(each.read(ours).float(), each.read(eager).float(), rtol=0.08, atol=0.05)
    assert set(each.ratios.values()) == set(each.runs) - {contests.OURS}
    assert each.part_of_bound() < 5  # on a CPU a product of experts is rounded before its epilogue
    found = each.read(ours)
    wrong = Contest(each.name, {**each.runs, contests.OURS: lambda: found + 1}, {}, each.exact)
    assert wrong.part_of_bound() > 5
    measured = contest.measure(each, Bench(CPU, Effort(rounds=1)))
    assert measured.keys() - {"relative_errors"} == {"us", *each.ratios}
    assert measured["us"].keys() == each.runs.keys()


def test_the_figures() -> None:
    cases: dict[str, Any] = {
        "a": {"us": {"epigemm": 10.0, "grouped_mm": 20.0}, "vs_grouped_mm": 2.0},
        "b": {"us": {"epigemm": 10.0, "grouped_mm": 5.0}, "vs_grouped_mm": 0.5},
    }
    assert contest.geomeans(cases) == {"vs_grouped_mm": (1.0, 0.5)}
    shown = contest.table(cases)
    assert shown.columns == ("case", "us", "vs_grouped_mm") and shown.rows[1] == ["b", "10.0", "0.500"]
