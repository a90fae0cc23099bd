"""Times of calls: how many, in which order; on a GPU, that host and device are told apart."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.models import measures
from benchmarks.models.measures import Effort

CPU = torch.device("cpu")


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []

    def row(call: Any, count: int, device: torch.device) -> float:
        log.append((call, count))
        return 1.0

    monkeypatch.setattr(measures, "row_ms", row)
    calls: Any = {"a": "a", "b": "b"}
    times = measures.in_turn(calls, {"a": 1.0, "b": 16.0}, CPU, Effort(turns=3, least_turns=3))
    assert log == [("a", 8), ("b", 1), ("b", 1), ("a", 8), ("a", 8), ("b", 1)]
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}


@pytest.mark.parametrize(("typical_ms", "turns"), [(0.1, 21), (50.0, 15), (500.0, 7)])
def test_long_calls_have_fewer_turns(monkeypatch: pytest.MonkeyPatch, typical_ms: float, turns: int) -> None:
    monkeypatch.setattr(measures, "row_ms", lambda *_: 1.0)
    calls: Any = {"a": None, "b": None}
    times = measures.in_turn(calls, dict.fromkeys(calls, typical_ms), CPU, Effort())
    assert len(times["a"]) == turns


@pytest.mark.parametrize(("typical_ms", "count"), [(0.1, 9), (30.0, 5), (1000.0, 3)])
def test_long_calls_are_timed_less_often(typical_ms: float, count: int) -> None:
    assert measures.singles(typical_ms, Effort()) == count


def test_warming_up_ends() -> None:
    calls: list[int] = []
    measures.warm_up(lambda: calls.append(1), CPU, Effort(warm_calls=5))
    assert len(calls) == 5
    calls.clear()

    def slow() -> None:
        calls.append(1)
        time.sleep(0.01)

    measures.warm_up(slow, CPU, Effort(warm_ms=5.0))
    assert len(calls) == 3


def test_a_cpus_times_are_of_whole_calls() -> None:
    def call() -> None:
        time.sleep(0.01)

    for ms in (
        measures.row_ms(call, 2, CPU),
        measures.host_ms(call, 3, CPU),
        measures.device_ms(call, 1, 3, CPU),
    ):
        assert 10 <= ms < 30


@pytest.mark.gpu
def test_host_and_device_are_told_apart() -> None:
    gpu, cuda = torch.device("cuda"), torch.cuda
    x = torch.randn(4096, 4096, device=gpu)

    def busy_device() -> None:
        for _ in range(20):
            torch.mm(x, x)

    def busy_host() -> None:
        torch.mm(x, x)
        time.sleep(0.01)
        torch.mm(x, x)

    measures.warm_up(busy_device, gpu, Effort())
    two_ms = measures.device_ms(lambda: (torch.mm(x, x), torch.mm(x, x)), 0.1, 5, gpu)
    assert measures.host_ms(busy_device, 5, gpu) < 2
    assert measures.device_ms(busy_device, 0.5, 5, gpu) == pytest.approx(10 * two_ms, rel=0.3)
    assert measures.host_ms(busy_host, 5, gpu) > 10
    assert measures.device_ms(busy_host, 10.0, 5, gpu) == pytest.approx(two_ms, rel=0.3)
    assert cuda.current_stream().query()


@pytest.mark.gpu
def test_the_kernels_of_a_call_that_waits_are_added_up() -> None:
    gpu = torch.device("cuda")
    x = torch.randn(4096, 4096, device=gpu)

    def waits() -> None:
        torch.mm(x, x)
        torch.cuda.synchronize()
        time.sleep(0.005)
        torch.mm(x, x)

    measures.warm_up(waits, gpu, Effort())
    two_ms = measures.device_ms(lambda: (torch.mm(x, x), torch.mm(x, x)), 0.1, 5, gpu)
    assert measures.device_ms(waits, 6.0, 5, gpu) == pytest.approx(two_ms, rel=0.3)
