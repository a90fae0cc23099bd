"""Small products are left to eager mode, whose host time decides there; graphs fuse them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from epigemm import fusion
from epigemm.fusion import worth

Limits = dict[tuple[str, bool, bool], int]


@pytest.fixture
def limits(every_size: Limits, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """The limits as they are."""
    monkeypatch.setattr(worth, "SMALLEST", every_size)
    return every_size


def ran_fused(model: nn.Module, x: torch.Tensor) -> bool:
    with fusion.watch() as unfused:
        model(x)
    assert unfused in ([], [("0", worth.TOO_SMALL)])
    return not unfused


def test_small_products_run_unfused_and_say_so(limits: Limits) -> None:
    fused = epigemm.fuse(nn.Sequential(nn.Linear(128, 128), nn.ReLU()))
    rows = limits["cpu", False, False] // 128**2
    with torch.no_grad():
        assert ran_fused(fused, torch.randn(rows, 128))
        assert not ran_fused(fused, torch.randn(rows - 1, 128))
    assert not ran_fused(fused, torch.randn(rows, 128))
    assert ran_fused(fused, torch.randn(limits["cpu", True, False] // 128**2, 128))
    assert not ran_fused(fused, torch.randn(0, 128))


def test_graphs_fuse_every_size(limits: Limits) -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
        return graph_module.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(2, 8)
    compiled: Any = torch.compile(epigemm.fuse(model), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert any("epigemm.linear" in name for name in seen)


def test_every_kind_of_call_has_a_limit(limits: Limits) -> None:
    assert set(limits) == {(d, r, s) for d in ("cpu", "cuda") for r in (False, True) for s in (False, True)}
