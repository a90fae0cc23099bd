"""`epigemm.explain` of a fused model: what its graphs run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import site
from tests.fusion.eager import fuse_eagerly, report_of
from tests.support.pieces import Road


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x)))) + x  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.bn = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.bmm(self.bn(x)[None], x.t()[None])[0]


@pytest.fixture
def model() -> Model:
    return Model()


def test_each_product_has_its_layers_name(model: Model) -> None:
    fused, x = fuse_eagerly(model), torch.randn(6, 16)
    found = epigemm.explain(fused, x)
    assert found.about == "Model, fused by epigemm.fuse"
    names = [each.name for each in found]
    assert names[:4] == ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2"]
    gelu = found["blocks.1.fc1"]
    assert gelu.size == (6, 32, 16) and gelu.runs == "fallback" and gelu.explanation is not None
    assert any("gelu" in note for note in gelu.notes)
    skipped = {each.name: each.reason for each in report_of(fused).skipped}
    wanted = "fuse takes no product of this form"
    (plain,) = [each for each in found if each.explanation is None]
    assert plain.function == "bmm" and plain.why == skipped.get(plain.name, wanted) and plain.columns[-1]


def test_a_call_whose_result_has_another_shape_has_its_layers_name() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.fc(x).view(4, 8))

    (product,) = epigemm.explain(fuse_eagerly(Viewed()), torch.randn(2, 2, 8))
    assert (product.name, product.function) == ("fc", "linear_relu") and product.notes


def test_it_is_the_road_that_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fused call that the model makes is told, and no other."""
    fused, x = fuse_eagerly(model.eval()), torch.randn(6, 16)
    found = epigemm.explain(fused, x)
    made: list[str] = []
    call = site.Site.__call__

    def counted(self: Any, *args: Any) -> Any:
        made.append(self.__name__)
        return call(self, *args)

    monkeypatch.setattr(site.Site, "__call__", counted)
    fused(x)
    told = [each.function for each in found if each.explanation is not None]
    assert [f"fused_{name}" for name in told] == made and len(made) >= 4


def test_nothing_is_changed_and_calls_go_on(model: Model) -> None:
    fused, x = fuse_eagerly(model), torch.randn(6, 16)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    generator = torch.get_rng_state()
    epigemm.explain(fused, x)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in fused.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(each.grad is None for each in fused.parameters()) and fused.training


def test_a_fused_part_of_a_plain_model(model: Model) -> None:
    model.blocks[1] = fuse_eagerly(model.blocks[1])
    found = epigemm.explain(model, torch.randn(6, 16))
    runs = {each.name: each.explanation is not None for each in found}
    assert runs["blocks.0.fc1"] is False and runs["blocks.1.fc1"] is True
    assert found["blocks.1.fc1"].notes and found["blocks.0.fc1"].runs == "PyTorch's own"


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        torch._dynamo.graph_break()
        return torch.relu(self.fc2(x))


def test_a_broken_graph_is_said() -> None:
    found = epigemm.explain(fuse_eagerly(Breaks()), torch.randn(4, 8))
    assert [each.name for each in found] == ["fc1", "fc2"]
    assert found.notes[-1] == "2 graphs: what runs between them is not listed"


def test_a_time_where_a_gpu_decides(road: Road) -> None:
    layer = nn.Linear(road.size[2], road.size[1], device=road.device).requires_grad_(False)
    fused = fuse_eagerly(nn.Sequential(layer, nn.ReLU()))
    (product,) = epigemm.explain(fused, road.x())
    assert product.explanation is not None
    assert product.explanation.us is not None and product.size == road.size
