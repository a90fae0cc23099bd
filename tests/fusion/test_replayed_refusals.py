"""Graphs that are not replayed: why, and what runs in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import kinds
from epigemm.fusion.replayable import RANDOM, RECORDED
from tests.fusion.launchers import Block, Function, StandIn, assert_same, fused, reasons
from tests.support.untyped import backward


def mutated(z: Tensor, x: Tensor) -> Tensor:
    x.add_(1)
    return z + x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mutated, "writes to memory that is there before the call"),
        (lambda z, x: F.dropout(z, 0.5, True), RANDOM),
        (lambda z, x: z + torch.rand_like(z), RANDOM),
        (lambda z, x: z + x.as_strided((8,), (1,), 0), "looks at memory around an input"),
    ],
)
def test_what_is_refused(launcher: StandIn, function: Callable[..., Any], reason: str) -> None:
    model = Function(function)
    mine = fused(model)
    for _ in range(3):
        x = torch.rand(8, 8)
        xs = x.clone(), x.clone()
        with torch.no_grad():
            results = []
            for each, argument in zip((mine, model), xs, strict=True):
                torch.manual_seed(1)
                results.append(each(argument))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*xs)
    assert not launcher.graphs
    assert reason in reasons(mine)


def test_gradients_are_refused_and_right(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for _ in range(3):
        x = torch.rand(6, 8, requires_grad=True)
        backward(mine(x).sum())
        expected = torch.autograd.grad(model(x).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)
    assert not launcher.graphs
    assert reasons(mine) == RECORDED
    for _ in range(3):
        assert_same(mine, model, torch.rand(6, 8))
    assert launcher.replays == 2


def test_frozen_parameters_in_grad_mode(launcher: StandIn) -> None:
    model = Block().eval().requires_grad_(False)
    mine = fused(model)
    for _ in range(4):
        x = torch.rand(6, 8)
        found = mine(x)
        assert not found.requires_grad
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
    assert launcher.replays == 3


def test_without_gradients_inside_alone(launcher: StandIn) -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    model = Model().eval()
    mine = fused(model)
    for _ in range(4):
        x = torch.rand(6, 8)
        torch.testing.assert_close(mine(x), model(x), rtol=1e-5, atol=1e-5)
    assert launcher.replays == 3


class Quiet(nn.Module):
    """Takes no gradients, whatever the mode of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x) * scale, self.fc.weight.view(-1)


def test_views_of_parameters_are_as_they_were_made(launcher: StandIn) -> None:
    model = Quiet()
    mine = fused(model)
    for _ in range(3):
        x, scale = torch.rand(4, 8), torch.rand(8)
        found, expected = (each(x, scale)[1] for each in (mine, model))
        assert found.grad_fn is expected.grad_fn is None
        assert found.data_ptr() == expected.data_ptr()
    assert launcher.replays == 2


def test_parameters_of_others_are_not_copied_where_it_is_recorded(launcher: StandIn) -> None:
    model, scale = Quiet(), nn.Parameter(torch.rand(8))
    mine = fused(model)
    for _ in range(3):
        x = torch.rand(4, 8)
        torch.testing.assert_close(mine(x, scale), model(x, scale), rtol=1e-5, atol=1e-5)
    assert not launcher.graphs and reasons(mine) == RECORDED
    for _ in range(3):
        assert_same(mine, model, torch.rand(4, 8), scale)
    assert launcher.replays == 2


def test_dropout_in_training(launcher: StandIn) -> None:
    mine = fused(Block()).train()
    with torch.no_grad():
        results = [mine(torch.ones(6, 8)) for _ in range(4)]
    assert not torch.equal(results[2], results[3])
    assert not launcher.graphs
    assert RANDOM in reasons(mine)


def test_statistics_in_training(launcher: StandIn) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    mine, plain = epigemm.fuse(copy.deepcopy(model), cuda_graphs=True), model
    for _ in range(4):
        assert_same(mine, plain, torch.rand(6, 8))
    for found, expected in zip(mine.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
    assert not launcher.graphs


def test_on_a_cpu_nothing_is_captured() -> None:
    model = Block().eval()
    mine = fused(model)
    for _ in range(3):
        assert_same(mine, model, torch.rand(6, 8))
    assert reasons(mine) == "it runs on cpu"
    assert "kernel by kernel: it runs on cpu" in str(mine.fusion_report)
    assert len(mine.fusion_report.sites) == 2


def test_under_somebody_elses_capture(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for outer in (True, False, False, True, False):
        launcher.outer = outer
        assert_same(mine, model, torch.rand(6, 8))
    assert launcher.replays == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted\nmore"), "RuntimeError: operation not permitted"),
        (torch.OutOfMemoryError("none"), "there is no memory for another CUDA graph"),
        (TypeError("odd"), "TypeError: odd"),
    ],
)
def test_a_capture_that_fails_costs_no_call(launcher: StandIn, error: Exception, reason: str) -> None:
    launcher.fails = error
    model = Block().eval()
    mine = fused(model)
    for _ in range(4):
        assert_same(mine, model, torch.rand(6, 8))
    assert reasons(mine).endswith(reason)
    assert not launcher.graphs


@pytest.mark.parametrize("decide", ["measure", "predict"])
def test_what_cannot_be_captured_is_measured(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch, decide: Any
) -> None:
    """It was judged as a graph that does not wait for the host."""
    monkeypatch.setattr(kinds, "ON_CUDA_ALONE", False)
    launcher.fails = RuntimeError("no")
    model = Block().eval()
    mine: Any = epigemm.fuse(model, cuda_graphs=True, decide=decide)
    for _ in range(4):
        assert_same(mine, model, torch.rand(6, 8))
    assert len(vars(mine)["_compiled_call_impl"]._kinds._trials) == (decide == "measure")


def test_an_argument_that_cannot_be_interrupted(launcher: StandIn) -> None:
    launcher.fails = None
    model = Block().eval()
    mine = fused(model)
    assert_same(mine, model, torch.rand(6, 8))
    launcher.fails = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        assert_same(mine, model, torch.rand(6, 8))
    launcher.fails = None
    for _ in range(2):
        assert_same(mine, model, torch.rand(6, 8))
    assert launcher.replays == 2
