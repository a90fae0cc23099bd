"""What stands for results while a function is explained, and that nothing of a module's call is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.explain.log import logged
from epigemm.packs import weight_packs
from tests.support.pieces import Road


@pytest.mark.parametrize("name", ["linear_gelu", "linear_scale", "linear_glu"])
def test_what_stands_for_results_is_zero(name: str) -> None:
    """Never memory as it was found: a layer behind the call reads it."""
    weight, row = torch.randn(8, 16).requires_grad_(), torch.randn(8)

    @epigemm.epilogue
    def amax(acc: Tensor) -> Any:
        return acc.amax(0), acc.amin(0)

    _, opened = logged(name, torch.randn(4, 16), weight, row, *([row] if name == "linear_scale" else []))
    assert not bool(opened.returned.any()) and opened.returned.requires_grad
    _, opened = logged(amax, torch.randn(4, 16), weight)
    assert not any(bool(each.any()) for each in opened.returned)


def test_a_module_that_reads_its_products(road: Road) -> None:
    """A layer's call is made, and its pack is left alone, also where a gradient is recorded."""
    layer = epigemm.nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(road.weight(), requires_grad=False)
    (product,) = epigemm.explain(layer, road.x())
    assert product.explanation is not None
    of_weight = ("the weight is read as it lies", "the weight is split at every call")
    assert any(reason.startswith(of_weight) for reason in product.explanation.reasons)
    assert not weight_packs.kept(layer.weight)
    learnt = nn.Parameter(road.weight())
    pack = weight_packs.keep(learnt, 2)
    assert "recorded" in str(epigemm.explain("linear_gelu", road.x(), learnt)) and pack.is_current(learnt)
