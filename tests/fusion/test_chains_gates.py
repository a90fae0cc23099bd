"""Chains that read results of other products, before and behind them, once or twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn

ROWS, WIDTH = 5, 8


class Layers(nn.Module):
    """Two of one width, one of a single column."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.row = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)


def gated_by_a_row(self: Any, x: Tensor, c: Tensor) -> Any:
    return self.a(x) * torch.sigmoid(self.row(x))


def gated_by_a_plain_row(self: Any, x: Tensor, c: Tensor) -> Any:
    return self.a(x) * self.row(x)


def swiglu(self: Any, x: Tensor, c: Tensor) -> Any:
    """As Llama has it."""
    return F.silu(self.a(x)) * self.b(x)


def swiglu_turned(self: Any, x: Tensor, c: Tensor) -> Any:
    return self.b(x) * F.silu(self.a(x))


def geglu(self: Any, x: Tensor, c: Tensor) -> Any:
    """As T5 and Gemma have it."""
    hidden, other = F.gelu(self.a(x), approximate="tanh"), self.b(x)
    return F.dropout(hidden * other, 0.1, False)


def gate_first(self: Any, x: Tensor, c: Tensor) -> Any:
    gate = self.row(x)
    return self.a(x) * gate


def gate_is_returned(self: Any, x: Tensor, c: Tensor) -> Any:
    a, b = self.a(x), self.b(x)
    return a * b, b


def activated_gate_is_returned(self: Any, x: Tensor, c: Tensor) -> Any:
    a, b = self.a(x), F.silu(self.b(x))
    return a * b, b


def draws(self: Any, x: Tensor, c: Tensor) -> Any:
    mean, logarithm = self.a(x), self.b(x)
    return mean + torch.exp(0.5 * logarithm), mean, logarithm


def film(self: Any, x: Tensor, c: Tensor) -> Any:
    h = self.a(x)
    return F.relu(h * (1 + self.b(c)) + self.b(c + 1))


def film_by_a_row(self: Any, x: Tensor, c: Tensor) -> Any:
    h = self.a(x)
    return F.relu(h * (1 + self.b(c[:1])) + self.b(c[1:2]))


def highway(self: Any, x: Tensor, c: Tensor) -> Any:
    h, gate = F.relu(self.a(x)), torch.sigmoid(self.b(x))
    return h * gate + x * (1 - gate)


def pooled(self: Any, x: Tensor, c: Tensor) -> Any:
    return (torch.tanh(self.a(x)) * torch.sigmoid(self.row(x))).sum(0)


def experts(self: Any, x: Tensor, c: Tensor) -> Any:
    a, b, gate = F.relu(self.a(x)), F.relu(self.b(x)), torch.sigmoid(self.row(x))
    return gate * a + (1 - gate) * b


def gates_of_gates(self: Any, x: Tensor, c: Tensor) -> Any:
    a, b, row = self.a(x), self.b(x), torch.sigmoid(self.row(x))
    return a * (b * row), row


def seen_in_another_shape(self: Any, x: Tensor, c: Tensor) -> Any:
    a = F.relu(self.a(x).view(-1)) * self.b(x).view(-1)
    return a.view(ROWS, WIDTH), self.b(c)


def gate_is_the_next_input(self: Any, x: Tensor, c: Tensor) -> Any:
    a, gate = self.a(x), torch.sigmoid(self.b(x))
    return a * gate + self.b(gate)


def mixed_by_a_row(self: Any, x: Tensor, c: Tensor) -> Any:
    """These broadcast by themselves what they are given, which on symbols PyTorch writes in Python."""
    return torch.lerp(self.a(x), c, self.row(c)), torch.addcmul(self.a(c), self.row(x), x)


FORWARDS: list[tuple[Callable[..., Any], int]] = [
    *[(each, 2) for each in (swiglu, swiglu_turned, geglu)],
    *[(each, 2) for each in (gated_by_a_row, gated_by_a_plain_row, gate_first, gate_is_returned)],
    *[(each, 2) for each in (activated_gate_is_returned, draws, highway, pooled)],
    *[(each, 3) for each in (film, film_by_a_row, experts, gates_of_gates, seen_in_another_shape)],
    (gate_is_the_next_input, 3),
    (mixed_by_a_row, 4),
]


def outcome(call: Any, model: nn.Module, inputs: tuple[Tensor, ...], learns: bool) -> list[Tensor]:
    """The results, and the gradients of all that is learned."""
    with torch.set_grad_enabled(learns):
        given = [value.clone().requires_grad_(learns) for value in inputs]
        results = call(*given)
        found = list(results) if isinstance(results, tuple) else [results]
        if learns:
            total = sum((result.square().sum() for result in found), torch.zeros(()))
            found += [
                gradient
                for gradient in torch.autograd.grad(total, [*given, *model.parameters()], allow_unused=True)
                if gradient is not None
            ]
    return found


@pytest.mark.parametrize(
    ("case", "road"),
    in_turn(FORWARDS, ["fuse", "aot_eager"]),
    ids=lambda v: v if isinstance(v, str) else v[0].__name__,
)
def test_values_and_gradients(case: tuple[Callable[..., Any], int], road: str) -> None:
    forward, products = case
    torch.manual_seed(1)
    model, report = type("Model", (Layers,), {"forward": forward})(), FusionReport()
    inputs = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    if road == "fuse":
        fused = fuse_eagerly(model)
        report = fused.fusion_report
    else:
        options: Any = {"backend": road, "report": report.add}
        fused = torch.compile(model, backend="epigemm", fullgraph=True, options=options)
    for learns in (False, True):
        torch.testing.assert_close(
            outcome(fused, model, inputs, learns), outcome(model, model, inputs, learns), rtol=1e-5, atol=1e-5
        )
        assert len(report.sites) == products and not report.skipped, report


def test_the_report_has_the_order_of_the_model() -> None:
    model = type("Model", (Layers,), {"forward": experts})()
    report = fuse_eagerly(model, dry_run=True, example_inputs=(torch.randn(ROWS, WIDTH),) * 2)
    assert [site.name for site in report.sites] == ["a", "b", "row"]
    assert any(site.function == "linear_relu_mul" for site in report.sites), report


def test_what_broadcasts_by_itself_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    model = type("Model", (Layers,), {"forward": mixed_by_a_row})()
    report = fuse_eagerly(model, dry_run=True, example_inputs=(torch.randn(ROWS, WIDTH),) * 2)
    assert [site.function for site in report.sites if site.name == "a"] == ["linear_lerp", "linear_addcmul"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
