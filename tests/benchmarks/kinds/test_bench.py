"""`python -m benchmarks` at tiny sizes: its record, its files, and that a wrong result can not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.harness.records import CaseResult, Group, Measurement, Timing
from benchmarks.kinds import bench


def of_times(problem: str, dtype: str, **ms: float) -> CaseResult:
    group = Group("turn 1", [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()])
    return CaseResult("case", problem, (), "", (1000, 4300, 64), dtype, "", 1, 1, groups=[group])


def test_the_bound_of_a_batch_norm_in_training() -> None:
    """The product, and 4 bytes of each element (8,600 x 2,000 at 4.3 TB/s: 4 us)."""
    training = of_times("linear/scale_batch_norm:train", "bf16", epigemm=0.01, mm=0.004)
    assert bench.bound(training) == pytest.approx({"bound_ms": 0.008, "vs_bound": 0.8})
    assert bench.figures([training])["cases"]["case"]["vs_bound"] == pytest.approx(0.8)
    for problem, dtype in (("linear/scale_batch_norm", "bf16"), ("linear/scale_batch_norm:train", "fp32")):
        assert bench.bound(of_times(problem, dtype, epigemm=0.01, mm=0.004)) == {}
    for times in ({"epigemm": 0.01}, {"mm": 0.004}):
        assert bench.bound(of_times("linear/scale_batch_norm:train", "bf16", **times)) == {}
