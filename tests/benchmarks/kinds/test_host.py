"""`python -m benchmarks --host`: its variants, how they are timed, and the ratios."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Shape
from benchmarks.cases import host as host_cases
from benchmarks.cases.host import HostCase
from benchmarks.harness.timing import CpuTimer
from benchmarks.kinds import host
from epigemm.tuner.timing import Run

CPU, SHAPE = torch.device("cpu"), Shape(4, 8, 16)
COMPILED = "compiled/bf16"


@pytest.mark.parametrize("name", [name for name in host_cases.CASES if name != COMPILED])
def test_variants_compute_the_same(name: str) -> None:
    """All but torch's single operators, which leave the rest of the formula out."""
    case = host_cases.make(name, SHAPE, CPU)
    with torch.set_grad_enabled(case.gradients):
        results = {name: run() for name, run in case.runs.items() if name not in ("f_linear", "torch")}
    expected = results.get("eager", results.get("function"))
    for variant, result in results.items():
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2, msg=f"{name}: {variant}")
        assert result.requires_grad == case.gradients


# --- how it is timed, by a clock that moves as the test says ---------------------------------------------------


class Clock(CpuTimer):
    """Each call takes the next of its variant's times, each wait for the device as long as told."""

    def __init__(self, waits: float) -> None:
        super().__init__(CPU)
        self.now, self.waits, self.called = 0.0, waits, ""

    def synchronize(self) -> None:
        self.now += self.waits

    def run(self, name: str, seconds: list[float]) -> Run:
        def call() -> torch.Tensor:
            self.now += seconds.pop(0)
            self.called += name
            return torch.empty(0)

        return call


@pytest.fixture
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Clock]:
    def make(waits: float) -> Clock:
        clock = Clock(waits)
        monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        return clock

    return make


def test_the_least_of_the_rounds_medians_counts(make_clock: Callable[[float], Clock]) -> None:
    clock = make_clock(0.0)
    # A turn that warms up, then two rounds of three turns of one call.
    first = clock.run("a", [90.0, *(5.0, 1.0, 7.0), *(4.0, 9.0, 6.0)])
    second = clock.run("b", [90.0, *(2.0, 2.0, 8.0), *(3.0, 3.0, 3.0)])
    case = HostCase("any", SHAPE, {"a": first, "b": second})
    found = host.measure([case], clock, rounds=2, turns=3, calls=1)["any"]
    assert found == pytest.approx({"a": 5e6, "b": 2e6})
    assert clock.called == "ab" * 7


@pytest.mark.parametrize(("waits", "limited"), [(0.0, False), (2.9, False), (3.1, True)])
def test_a_case_that_waits_for_the_device_is_marked(
    waits: float, limited: bool, make_clock: Callable[[float], Clock]
) -> None:
    clock = make_clock(waits)
    case = HostCase("any", SHAPE, {"a": clock.run("a", [20.0] * 4), "b": clock.run("b", [5.0] * 4)})
    record = host.measure([case], clock, rounds=1, turns=1, calls=2)["any"]
    assert record == {"a": 20e6, "b": 5e6} | ({"limited_by_gpu": True} if limited else {})
    table = host.times_table({"cases": {"any": record}, "shapes": {"any": ""}})
    assert table.rows[0][-1] == ("limited by the GPU" if limited else "")


# --- the ratios, against numbers worked out by hand ------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "times", "rows"),
    [
        (
            "linear_relu/bf16",
            {"f_linear": 10, "eager": 5, "function": 11, "out": 10, "module": 21, "module_eager": 20},
            [
                ["function / f_linear", "1.100", "1.1", ""],
                ["out / function", "0.909", "1", ""],
                ["module / module_eager", "1.050", "1", "missed"],
            ],
        ),
        (
            "linear_relu/fp32",
            {"f_linear": 1, "eager": 10, "function": 10.1},
            [["function / eager", "1.010", "1", "missed"]],
        ),
        (
            "custom_gelu/fp32",
            {"f_linear": 1, "eager": 10, "function": 9, "out": 9},
            [["function / eager", "0.900", "1", ""], ["out / function", "1.000", "1", ""]],
        ),
        (
            "batch_norm/bf16",
            {"torch": 10, "eager": 1, "function": 13.1, "out": 14},
            [["function / torch", "1.310", "1.3", "missed"], ["out / function", "1.069", "1", "missed"]],
        ),
        ("train_step/fp32", {"eager": 10, "module": 12}, [["module / eager", "1.200", "1.2", ""]]),
        (COMPILED, {"inductor": 10, "epigemm": 9}, [["epigemm / inductor", "0.900", "1", ""]]),
    ],
)
def test_the_ratios_and_what_is_wanted(case: str, times: dict[str, float], rows: list[list[str]]) -> None:
    assert host.ratio_table({"cases": {case: times}}).rows == [[case, *row] for row in rows]
