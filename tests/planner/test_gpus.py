"""GPUs in figures. What they reach: tests/gemm/test_architectures.py."""

from __future__ import annotations

from epigemm.planner.gpus import KNOWN
from tools.planner import ask_planner


def test_the_planner_takes_every_known_gpu() -> None:
    for gpu in KNOWN.values():
        answer = ask_planner("bias_gelu", 1024, 1024, 1024, "bfloat16", "ieee", gpu=gpu.numbers)
        family = "sm80_mma" if gpu.capability != (9, 0) else "sm90"
        assert answer["candidates"] and not answer["is_speed_assumed"]
        assert all(each["family"].startswith(family) for each in answer["candidates"])
