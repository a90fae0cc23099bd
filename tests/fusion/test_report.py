"""What the report says, and what `epigemm.explain` of a fused model says beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.fusion.eager import fuse_eagerly, report_of


def test_equal_blocks_are_one_line() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
    report = fuse_eagerly(nn.Sequential(*blocks), dry_run=True, example_inputs=[torch.rand(4, 8)])
    text = str(report).splitlines()
    assert text[0] == "6 of 6 products fused"
    assert text[1:] == ["  *.0 (3): linear_gelu: gelu(acc + c1)", "  *.2 (3): linear: acc + c1"], str(report)


def test_before_the_first_call() -> None:
    fused = fuse_eagerly(nn.Linear(8, 8))
    assert str(report_of(fused)) == "0 of 0 products fused; nothing is compiled before the first call"
    fused(torch.rand(4, 8))
    assert "before" not in str(report_of(fused))


# --- explain ----------------------------------------------------------------------------------------------------------


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
    """What runs is told: each fused call, and no other. Nothing is changed, and calls go on."""
    fused, x = fuse_eagerly(model), torch.randn(6, 16)
    before, generator = (
        {name: value.clone() for name, value in fused.state_dict().items()},
        torch.get_rng_state(),
    )
    found = epigemm.explain(fused, x)
    assert torch.equal(torch.get_rng_state(), generator) and fused.training
    torch.testing.assert_close(fused.state_dict(), before, rtol=0, atol=0)
    assert all(each.grad is None for each in fused.parameters())
    assert found.about == "Model, fused by epigemm.fuse"
    names = [each.name for each in found]
    assert names[:4] == ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2"]
    gelu = found["blocks.1.fc1"]
    assert gelu.size == (6, 32, 16) and gelu.runs == "fallback" and gelu.explanation is not None
    assert any("gelu" in note for note in gelu.notes)
    (plain,) = [each for each in found if each.explanation is None]
    assert (plain.function, plain.why) == ("bmm", "fuse takes no product of this form") and plain.columns[-1]
    fused(x)
    told = sorted(each.function for each in found if each.explanation is not None)
    assert sorted(site.function for site in report_of(fused).sites) == told


class Viewed(nn.Module):
    """A call whose result has another shape, and a broken graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x).view(4, 8))
        torch._dynamo.graph_break()
        return torch.relu(self.fc2(x))


def test_a_broken_graph_is_said() -> None:
    found = epigemm.explain(fuse_eagerly(Viewed()), torch.randn(2, 2, 8))
    assert [(each.name, each.function) for each in found] == [("fc1", "linear_relu"), ("fc2", "linear_relu")]
    assert found.notes[-1] == "2 graphs: what runs between them is not listed"


def test_a_fused_part_of_a_plain_model(model: Model) -> None:
    model.blocks[1] = fuse_eagerly(model.blocks[1])
    found = epigemm.explain(model, torch.randn(6, 16))
    runs = {each.name: each.explanation is not None for each in found}
    assert runs["blocks.0.fc1"] is False and runs["blocks.1.fc1"] is True
    assert found["blocks.1.fc1"].notes and found["blocks.0.fc1"].runs == "PyTorch's own"
