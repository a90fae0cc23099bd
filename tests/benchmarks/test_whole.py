"""Whole models: how errors are measured, the bars, the order of cases."""

from __future__ import annotations

import pytest
import torch

from benchmarks.whole import run
from benchmarks.whole.networks import NETWORKS


def test_the_error_is_the_worst_tensors() -> None:
    exact = [torch.ones(8), 2 * torch.ones(4)]
    assert run.error([each.clone() for each in exact], exact) == 0
    assert run.error([exact[0], 3 * torch.ones(4)], exact) == pytest.approx(0.5)
    assert run.error([exact[0]], exact) == float("inf")
    assert run.error([exact[0], torch.full((4,), float("nan"))], exact) == float("inf")


def test_a_gradient_that_is_zero_is_judged_beside_the_others() -> None:
    exact = [torch.ones(8), 1000 * torch.ones(4), torch.zeros(4)]
    found = [exact[0], exact[1], torch.full((4,), 0.25)]
    assert run.error(found, exact) == pytest.approx(0.25)


def test_bars() -> None:
    case = {"fuse_vs_eager": 1.5, "backend_vs_compile": 2.5}
    large = "bert-base/fp32_highest/inference/32x128"
    assert run.missed({large: case}) == [f"{large}: fuse_vs_eager is 1.500, wanted 2"]
    assert run.missed({"bert-base/fp32_highest/inference/8x128": case}) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_cases_start_with_the_large_batch(name: str) -> None:
    assert [*run.plan(name, run.TRAINING)] == [("fp32_highest", 1), ("bf16", 1)]
    assert next(run.plan(name, run.INFERENCE)) == ("fp32_highest", 1)
