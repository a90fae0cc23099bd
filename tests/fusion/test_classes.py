"""A fused model keeps its class: instances, copies, pickles, wrappers, regional compilation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import epigemm
from tests.fusion.eager import assert_all_fused, fuse_eagerly, report_of


class Block(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.width = width
        self.fc, self.out = nn.Linear(24, width), nn.Linear(width, 24)
        self.factor = 2.0

    def activation(self, z: Tensor) -> Tensor:
        return torch.relu(z) * self.factor

    def forward(self, x: Tensor) -> Any:
        return self.activation(self.out(self.activation(self.fc(x))))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(9, 24)


def same(actual: Any, expected: Any, x: Tensor, fused: bool | None = None) -> None:
    torch.testing.assert_close(actual(x), expected(x), rtol=1e-5, atol=1e-5)
    if fused:
        assert_all_fused(actual)


def test_slices_of_a_fused_sequential(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
    fused = fuse_eagerly(model)
    for part in (slice(0, 2), slice(2, None), slice(0, 0)):
        same(fused[part], model[part], x)
    same(fused + fused, model + model, x)


def test_other_instances_of_a_fused_class(x: Tensor) -> None:
    fused = fuse_eagerly(Block())
    other = type(fused)(16)
    plain = Block(16)
    other.load_state_dict(plain.state_dict())
    same(other, plain, x)
    same(fuse_eagerly(other), plain, x, fused=True)
    same(copy.deepcopy(other), plain, x)
    same(pickle.loads(pickle.dumps(other)), plain, x)


def test_another_class_after_fusing(x: Tensor) -> None:
    class Other(Block):
        def forward(self, x: Tensor) -> Any:
            return torch.relu(self.fc(x)) * 3

    plain = Block()
    fused = fuse_eagerly(plain)
    fused.__class__ = plain.__class__ = Other
    same(fused, plain, x)
    same(fuse_eagerly(fused), plain, x, fused=True)


def test_the_report_is_in_nobodys_way(x: Tensor) -> None:
    class Slotted(Block):
        __slots__ = ("slot",)

    fused = fuse_eagerly(Slotted())
    assert sorted(fused.state_dict()) == sorted(Block().state_dict())
    again: Any = pickle.loads(pickle.dumps(nn.Sequential(fuse_eagerly(Block()))))
    assert again[0].fusion_report is None
    assert not hasattr(epigemm.unfuse(fused), "fusion_report")


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("old", [False, True], ids=["parametrized", "hooks"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_computed_weights(x: Tensor, name: str, old: bool, after: bool) -> None:
    """`weight` is a property, or a plain attribute that a hook computes."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Any:
            return torch.relu(torch.nn.functional.linear(self.fc(x), self.fc.weight, self.last.bias))

    normalise: Any = getattr(torch.nn.utils if old else parametrizations, name)
    plain = Reads().eval()
    model = copy.deepcopy(plain)
    fused = fuse_eagerly(model, inplace=True) if after else model
    for made in (plain, model):
        torch.manual_seed(0)
        normalise(made.fc)
    fused = fused if after else fuse_eagerly(model, inplace=True)
    for _ in range(2):
        same(fused, plain, x)
        with torch.no_grad():
            for made in (plain, fused):
                for parameter in made.fc.parameters():
                    parameter.mul_(1.5)


def test_parametrised_modules_themselves(x: Tensor) -> None:
    """Their class changes, before fusing or after."""
    plain = Block()
    plain.scale = nn.Parameter(torch.rand(24))
    fused = fuse_eagerly(copy.deepcopy(plain))
    for made in (plain, fused):
        parametrize.register_parametrization(made, "scale", nn.Softplus())
    same(fused, plain, x)
    same(fuse_eagerly(plain, inplace=True), fused, x)


def test_lazy_layers(x: Tensor) -> None:
    model = nn.Sequential(nn.LazyLinear(24), nn.ReLU())
    fused = fuse_eagerly(model, inplace=True)
    expected = fused(x)
    torch.testing.assert_close(expected, torch.relu(fused[0](x)))
    same(fuse_eagerly(fused), fused, x, fused=None)


def test_children_that_are_fused_themselves(x: Tensor) -> None:
    """Their classes change after the trace of the module around them."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 24)
            self.graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(24, 24), nn.ReLU()))
            self.hooked = nn.Sequential(nn.Linear(24, 24), nn.ReLU())
            self.hooked.register_forward_hook(lambda module, arguments, result: result * 2)
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            x = torch.relu(self.fc(self.graph(x)))
            for child in (self.hooked, self.block):
                x = child(x) if isinstance(child, nn.Module) else x
            return x

    model = Outer()
    fused = fuse_eagerly(model)
    same(fused, model, x, fused=True)
    assert len(report_of(fused).sites) == 5


def test_compiling_by_regions(x: Tensor) -> None:
    """More blocks than torch.compile compiles versions of one function; each is compiled by itself."""
    torch._dynamo.reset()
    plain = nn.Sequential(*(Block() for _ in range(12)))
    fused = fuse_eagerly(plain)
    regions: list[Any] = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in fused]
    for _ in range(2):
        for region, block in zip(regions, plain, strict=True):
            same(region, block, x)
    torch._dynamo.reset()


def test_compiled_guards_notice_changes(x: Tensor) -> None:
    torch._dynamo.reset()
    plain = Block()
    fused = fuse_eagerly(plain)
    compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
    same(compiled, plain, x)
    plain.factor = fused.factor = 3.0
    same(compiled, plain, x)
    plain.fc, fused.fc = (layer := nn.Linear(24, 24)), layer
    same(compiled, plain, x)
    torch._dynamo.reset()
