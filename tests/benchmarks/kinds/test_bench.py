"""`python -m benchmarks` at tiny sizes: its record, its files, and that a wrong result can not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import problems
from benchmarks.harness.records import CaseResult, Group, Measurement, Timing
from benchmarks.kinds import bench


def of_times(problem: str, dtype: str, **ms: float) -> CaseResult:
    group = Group(
        "turn 1",
        [Measurement(name, name, in_turn=Timing.of([each])) for name, each in ms.items()],
    )
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


def test_the_real_sizes_are_those_of_the_problem_set() -> None:
    """2/76, 2/70, 2/33, 2/63: 1024; 8192 -> 8192. 2/39: 16384; 4096 -> 4096. 1/21: 4096 x 393216."""
    for real, square, batch, wide in (
        (True, "1024x8192x8192", "16384x4096x4096", "4096x393216"),
        (False, "128x512x1024", "128x512x1024", "16x16384"),
    ):
        found = {
            (model, str(shape))
            for problem in problems.problems()
            for shape, models in problems.sizes(problem, real=real).items()
            for model in models
        }
        squares = {(model, square) for model in ("2/76", "2/70", "2/33", "2/63")}
        assert found == {*squares, ("2/39", batch), ("1/21", wide)}
