"""What a site knows of a call like its last one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from epigemm import plans
from epigemm.fusion import building, site
from epigemm.fusion.repeat import Repeat
from tests.support.untyped import torch as untyped


def operands(**options: Any) -> list[Any]:
    return [torch.randn(4, 8, **options), nn.Parameter(torch.randn(8, 8)), None, 1e-5]


def test_what_makes_calls_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: True)
    known = Repeat()
    first = operands()
    assert known.holds(first) is False
    with torch.no_grad():
        known.remember(first)
        assert known.holds(operands()) is True
        x, weight, nothing, eps = operands()
        for other in (
            [x[:3], weight, nothing, eps],
            [x.double(), weight, nothing, eps],
            [x.to("meta"), weight, nothing, eps],
            [x.to_sparse(), weight, nothing, eps],
            [x, weight, torch.randn(8), eps],
            [x, None, nothing, eps],
            [x, weight, nothing, 1e-6],
            [x, weight, nothing, 1],
        ):
            assert known.holds(other) is False
        with torch.autocast("cpu"):
            assert known.holds(first) is False
        with torch.device("cpu"):
            assert known.holds(first) is False, "a mode that sees functions"
        untyped.set_float32_matmul_precision("high")
        try:
            assert known.holds(first) is False
        finally:
            untyped.set_float32_matmul_precision("highest")
    assert known.holds(first) is False, "its weight needs a gradient"
    known.remember(first)
    assert known.holds(operands()) is True
    with torch.no_grad():
        assert known.holds(first) is False
        with torch.autocast("cpu"):
            known.remember(first)
        assert known.holds(first) is False


def test_compiled_sites_run_in_plain_python_too() -> None:
    """After a graph break the rest of a forward may: when a compiler gave up, say."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    fused, x = epigemm.fuse(model), torch.randn(4, 8)
    (plan,) = {id(plan): plan for plan in fused.__dict__["_epigemm_state"].plans}.values()
    for _ in range(2):
        torch.testing.assert_close(plan.run_compiled(fused, x), model(x))
    handle = fused[0].register_forward_hook(lambda module, args, result: result + 1)
    torch.testing.assert_close(plan.run_compiled(fused, x), fused(x))
    handle.remove()


def test_nothing_stays_of_models_that_are_gone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    known = set(building._modules)
    epigemm.fuse(model, dry_run=True)
    assert set(building._modules) <= known, "a report needs nothing"
    fused = epigemm.fuse(model)
    mine = set(building._modules) - known
    assert mine
    del fused
    gc.collect()
    assert not mine & set(building._modules)


def test_a_site_that_is_not_there_from_call_to_call_remembers_nothing() -> None:
    assert not building.CompiledSite.remembers and not site.Site.remembers
