"""What the planner returns: numbers, words and times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm.planner import plans
from tools.planner import ask_planner

H200 = (90, 132, 1980, 4285000)


def test_times_are_measured_before_they_are_predicted() -> None:
    assert plans.fused_us({"predicted_us": 3.0}) == 3.0
    assert plans.fused_us({"predicted_us": 3.0, "measured_us": 2.0}) == 2.0
    assert plans.fused_us({}) == float("inf")
    assert plans.fallback_us({"fallback_us": 5.0}) == 5.0
    assert plans.fallback_us({"fallback_us": 5.0, "fallback_measured_us": 4.0}) == 4.0


def test_a_plan_in_words() -> None:
    answer = ask_planner("bias_silu", 8192, 4096, 1024, "bfloat16", "ieee", gpu=H200)
    assert answer["fused"] and answer["predicted_us"] < answer["fallback_us"]
    text = plans.tile_text(answer)
    assert text.startswith(f"tile {answer['tile']}, cluster ") and "parts" not in text
    assert plans.tile_text(answer | {"splits": 4}).endswith(", K in 4 parts")


@pytest.mark.parametrize("circumstances", [{"alignment": 8}, {"strides": (1025, 1024, 4096)}], ids=str)
def test_what_is_known_of_strides_and_alignment_counts(circumstances: dict[str, Any]) -> None:
    sizes = (8192, 4096, 1024)
    in_tf32 = ask_planner("bias_silu", *sizes, "float32", "tf32", gpu=H200, **circumstances)
    assert not in_tf32["fused"] and in_tf32["why_not_covered"]
    by_elements = ask_planner("bias_silu", *sizes, "bfloat16", "ieee", gpu=H200, **circumstances)
    assert not by_elements["fused"] and not by_elements["why_not_covered"]
    assert {each["schedule"] for each in by_elements["candidates"]} == {"by elements"}


def test_no_kernels_run_on_a_cpu() -> None:
    assert not plans.has_gpu_kernels(torch.empty(1))
