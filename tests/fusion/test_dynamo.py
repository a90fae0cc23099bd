"""The torch.compile backend "epigemm"."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from epigemm.fusion import FusionReport
from tests.fusion.layers import IN, OUT
from tests.fusion.test_spellings import draw


def compiled(model: Any, reports: list[FusionReport], backend: Any = "aot_eager", **options: Any) -> Any:
    settings = {"report": reports.append, "backend": backend}
    return torch.compile(model, backend="epigemm", fullgraph=True, options=settings, **options)


def test_modes_within_a_graph() -> None:
    """A chain does not reach over the end of a no_grad or autocast block."""

    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(IN, IN), nn.Linear(IN, IN)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = self.fc(x)
            h = torch.relu(z)
            z = cast(Tensor, self.last(h))
            with torch.no_grad():
                return z + torch.relu(z)

    model = Modes()
    plain, reports = copy.deepcopy(model), list[FusionReport]()
    fast = compiled(model, reports, backend="eager")
    x = draw().requires_grad_()
    actual, expected = fast(x), plain(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert actual.requires_grad == expected.requires_grad
    assert [site.function for site in reports[0].sites] == ["linear"] * 2
    assert any("mode" in note for site in reports[0].sites for note in site.notes), reports[0]


def test_autocast_inside() -> None:
    def forward(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = x @ weight.t()
            return torch.relu(z).float() + z * scale

    reports: list[FusionReport] = []
    arguments = draw(), draw(torch.float32, OUT, IN), draw(torch.float32, OUT)
    actual, expected = compiled(forward, reports)(*arguments), forward(*arguments)
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_inductor_compiles_the_rest() -> None:
    """With its options and modes."""
    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, OUT), nn.GELU()).eval()
    x = draw()
    for settings in ({"mode": "reduce-overhead"}, {"options": {"max_autotune": False}}):
        torch._dynamo.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, **settings)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_graph_that_is_traced_again_is_reported_once() -> None:
    """Inductor has Dynamo trace a graph again if it computes with a number that changes."""
    model, reports, x = (
        nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.LayerNorm(OUT)),
        list[FusionReport](),
        draw(),
    )
    options: dict[str, Any] = {"report": reports.append}
    compiled: Any = torch.compile(model, backend="epigemm", options=options, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert [len(report.sites) for report in reports] == [1]


def test_a_callable_for_the_rest() -> None:
    seen: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(graph_module)
        return graph_module.forward

    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU())
    x = draw()
    torch.testing.assert_close(compiled(model, [], backend)(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(seen) == 1 and "fused_linear_relu" in seen[0].code
