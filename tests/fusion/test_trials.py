"""Two forms of a call are timed in turn, by a scripted clock in place of CUDA's events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import host, kinds, profit, trials
from epigemm.fusion.chains import Chain
from epigemm.fusion.kinds import PLAIN_IS_FASTER
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.trials import Trial

WIDTH = 8
TURNS = trials._TURNS


@dataclass
class Clock:
    """Milliseconds of the device, which calls let pass; events are done where it is not `behind`."""

    now: float = 0.0
    behind: bool = False

    def event(self, device: int) -> Any:
        clock, at = self, self.now

        class Event:
            at: float

            def query(self) -> bool:
                return not clock.behind

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        made = Event()
        made.at = at
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trials, "recorded_event", made.event)
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * made.now))
    return made


def taking(clock: Clock, milliseconds: float) -> Callable[..., str]:
    def call(*args: Any, **kwargs: Any) -> str:
        clock.now += milliseconds
        return f"{args} {kwargs}"

    return call


@pytest.mark.parametrize(("fused_ms", "plain_ms"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_one_stays(clock: Clock, fused_ms: float, plain_ms: float) -> None:
    trial = Trial(0)
    turns = []
    clock.behind = True
    for turn in range(TURNS):
        assert trial.is_plain_faster() is None
        turns.append(trial.is_plains_turn)
        slow = 100.0 if turn < 4 else 0.0  # what links kernels is left out
        call = taking(clock, (plain_ms if turns[-1] else fused_ms) + slow)
        assert trial.run(call, (1,), {"a": 2}, is_plain=trial.is_plains_turn) == "(1,) {'a': 2}"
    assert turns == [False, True] * (TURNS // 2)
    assert trial.is_plain_faster() is None and not trial.is_plains_turn  # the device is behind
    clock.behind = False
    assert trial.is_plain_faster() == (plain_ms < fused_ms)


@pytest.mark.parametrize(
    ("fused_ms", "plain_ms", "is_plain_faster"),
    [
        ((3.0, 8.0), (3.5, 6.0), True),  # the device was busy: its own times say nothing of the calls to come
        ((3.0, 4.0), (3.5, 6.0), False),
        ((9.0, 8.0), (9.5, 6.0), False),  # the device takes longer, and is the limit
        ((9.0, 8.0), (9.05, 6.0), True),  # alike: the host's times decide
    ],
)
def test_the_longer_of_device_and_host_counts(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    fused_ms: tuple[float, float],
    plain_ms: tuple[float, float],
    is_plain_faster: bool,
) -> None:
    """Milliseconds of the device and of the host."""
    host_s = 0.0
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: host_s))
    trial = Trial(0)

    def call(device_ms: float, host_ms: float) -> None:
        nonlocal host_s
        clock.now += device_ms
        host_s += 1e-3 * host_ms

    for _ in range(TURNS):
        is_plain = trial.is_plains_turn
        trial.run(call, plain_ms if is_plain else fused_ms, {}, is_plain=is_plain)
    assert trial.is_plain_faster() == is_plain_faster


def test_calls_that_others_disturb_do_not_count(clock: Clock) -> None:
    """Three of the five timed calls of the faster form take longer than any of the other one.

    One call of the slower form is fast by chance.
    """
    trial = Trial(0)
    plain_ms, fused_ms = [1.0, 1.0, 9.0, 7.0, 1.0, 1.0, 6.0], [2.0, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0]
    for turn in range(TURNS):
        is_plain = trial.is_plains_turn
        times = plain_ms if is_plain else fused_ms
        trial.run(taking(clock, times[turn // 2]), (), {}, is_plain=is_plain)
    assert trial.is_plain_faster()


def test_threads_that_take_one_turn_note_what_each_ran(clock: Clock) -> None:
    """Both have asked whose turn it is before either of them calls."""
    trial = Trial(0)
    for turn in range(TURNS // 2):
        is_plain = turn % 2 == 1
        for _ in range(2):
            trial.run(taking(clock, 1.0 if is_plain else 2.0), (), {}, is_plain=is_plain)
    assert trial.is_plain_faster()


def test_a_call_that_raises_is_left_out(clock: Clock) -> None:
    trial = Trial(0)

    def fail() -> None:
        raise RuntimeError("out of order")

    for _ in range(TURNS):
        if trial.is_plains_turn:
            with pytest.raises(RuntimeError, match="out of order"):
                trial.run(fail, (), {}, is_plain=True)
        else:
            trial.run(taking(clock, 9.0), (), {}, is_plain=False)
    assert trial.is_plain_faster() is False


def test_where_bits_must_be_the_same_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.may_measure()
    with epigemm.batch_invariant():
        assert not trials.may_measure()
    torch.use_deterministic_algorithms(True)
    try:
        assert not trials.may_measure()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not trials.may_measure()


class Model(nn.Module):
    """Counts its own calls; a call of either form lets the clock pass."""

    count: Tensor

    def __init__(self, clock: Clock, plain_ms: float) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.clock, self.plain_ms, self.plain_runs = clock, plain_ms, 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.clock.now += self.plain_ms
            self.plain_runs += 1
        self.count += 1
        result: Tensor = self.drop(F.gelu(self.fc(x)))
        return result


@pytest.fixture
def is_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of CPU tensors have kinds, and no estimate is sure."""

    def verdict(graph: Any, chains: Any, launches: Any, *, measures: bool = False, **_: Any) -> host.Verdict:
        return host.Verdict("", measures)

    def judged(chain: Chain, **_: bool) -> Judged:
        return Judged("", Way.TENSORS, 1000.0, 500.0)

    monkeypatch.setattr(kinds, "ON_CUDA_ALONE", False)
    monkeypatch.setattr(host, "verdict", verdict)
    monkeypatch.setattr(profit, "judged", judged)


@pytest.mark.usefixtures("is_unsure")
@pytest.mark.parametrize("is_plain_faster", [False, True])
def test_a_model_runs_one_form_a_call(clock: Clock, is_plain_faster: bool) -> None:
    """Buffers that count and random numbers are eager's, whatever runs, during the trial and after it."""
    plain_ms = -1.0 if is_plain_faster else 1.0
    model = Model(clock, plain_ms)
    fused: Any = epigemm.fuse(model, inplace=True)
    with torch.no_grad():
        for call in range(1, TURNS + 6):
            x = torch.rand(4, WIDTH)
            torch.manual_seed(call)
            y = fused(x)
            torch.manual_seed(call)
            expected = F.dropout(F.gelu(F.linear(x, model.fc.weight, model.fc.bias)), 0.5)
            torch.testing.assert_close(y, expected)
            assert model.count == call and y.stride() == expected.stride()
    # The first call starts the trial; the one behind it is asked how it went.
    after = 3 if is_plain_faster else 0
    assert model.plain_runs == TURNS // 2 + after, model.plain_runs
    report = fused.fusion_report
    assert len(report.sites) == 1 and report.notes == [host.UNSURE] + [PLAIN_IS_FASTER] * is_plain_faster


@pytest.mark.usefixtures("is_unsure")
@pytest.mark.parametrize("why", ["predict", "deterministic", "invariant"])
def test_where_the_prediction_decides(clock: Clock, why: str) -> None:
    model = Model(clock, -1.0).eval()
    fused: Any = epigemm.fuse(model, inplace=True, decide="predict" if why == "predict" else "measure")
    x = torch.rand(4, WIDTH)
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        with torch.no_grad(), epigemm.batch_invariant(why == "invariant"):
            results = [fused(x) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.plain_runs == 0 and all(torch.equal(results[0], each) for each in results)


@pytest.mark.usefixtures("is_unsure")
def test_what_was_measured_is_forgotten_where_bits_must_be_the_same(clock: Clock) -> None:
    model = Model(clock, -1.0).eval()
    fused: Any = epigemm.fuse(model, inplace=True)
    x = torch.rand(4, WIDTH)
    with torch.no_grad():
        for _ in range(TURNS + 3):
            fused(x)
        assert PLAIN_IS_FASTER in fused.fusion_report.notes
        runs = model.plain_runs
        torch.use_deterministic_algorithms(True)
        try:
            fused(x)
            fused(x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert model.plain_runs == runs
        fused(x)
        assert model.plain_runs == runs + 1


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="decide: got 'guess'; accepted are 'measure', 'predict'"):
        epigemm.fuse(nn.Linear(2, 2), decide="guess")  # type: ignore[call-overload]
