"""State that a forward reads indirectly, and children that change it: the result is what torch.compile gives."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.eager import compile_eagerly, fuse_eagerly

WIDTH = 24


class Activation(enum.Enum):
    RELU = 1

    def __init__(self, value: int) -> None:
        self.factor = 2.0


class Assigns(nn.Module):
    """Changes itself when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 2.0
        self.shift: Tensor
        self.w: Tensor
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("w", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.shift, self.w = self.shift + x.mean(0), self.w * 1.5
        self.training = False
        self.rate += 1.0
        return x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 2.0

    def forward(self, x: Tensor) -> Any:
        return x * self.rate


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.net, self.drop = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Dropout(0.0)
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.table = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "class": nn.Linear(WIDTH, WIDTH)})
        self.assigns, self.keeps = Assigns(), Keeps()
        self.factor, self.steps, self.base, self.activation = 2.0, [1.0, 2.0], -2.0, Activation.RELU
        self.range, self.slice = range(0, 3, 2), slice(0, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.fc(x))


def with_attribute() -> None:
    pass


with_attribute.factor = 2.0  # type: ignore[attr-defined]


def keyword(z: Tensor, *, factor: float = 2.0) -> Any:
    return z * factor


def reads_enum(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.activation.factor


def reads_function(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * with_attribute.factor  # type: ignore[attr-defined]


def reads_range(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.range.stop


def reads_slice(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) / self.slice.stop


def calls_keyword(self: Any, x: Tensor) -> Any:
    return keyword(torch.relu(self.fc(x)))


def calls_net(self: Any, x: Tensor) -> Any:
    return self.net(x)


def iterates(self: Any, x: Tensor) -> Any:
    for block in self.blocks:
        x = torch.relu(block(x))
    return x


def clears(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x)) * len(self.table)
    self.table.clear()
    return z


def inserts(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x)) * len(self.blocks)
    self.blocks.insert(0, self.fc)
    return z


def mode_after(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(self.assigns(x)))
    return z * 2 if self.assigns.training else z


def buffer_around(self: Any, x: Tensor) -> Any:
    before = self.assigns.shift
    return torch.relu(self.fc(self.assigns(x))) + self.assigns.shift - before


def weight_before(self: Any, x: Tensor) -> Any:
    weight = self.assigns.w
    return torch.relu(F.linear(self.assigns(x), weight))


def rate_after(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(self.keeps(x))) * self.keeps.rate


def factor_after(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(self.drop(x))) * self.factor


def negative_base(self: Any, x: Tensor) -> Any:
    return self.base ** torch.relu(self.fc(x)).round()


def keyword_child(self: Any, x: Tensor) -> Any:
    for layer in self.table.values():
        x = torch.relu(layer(x))
    return x


def second_self(this: Any, self: Tensor) -> Any:
    return torch.relu(this.fc(self))


def argument_inf(self: Any, inf: Tensor) -> Any:
    return torch.relu(self.fc(inf)) / self.factor


def original(model: Any) -> Any:
    return type(model)


def put_property(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(original(model), name, property(lambda self: self.other))


def bump(model: Any) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        model.factor += 1.0

    return hook


def assigning(model: Any) -> None:
    model.keeps = Assigns()


@dataclass(frozen=True)
class Case:
    forward: Callable[..., Any]
    change: Callable[[Any], Any] = lambda model: None


CASES = [
    Case(reads_enum, lambda m: setattr(Activation.RELU, "factor", 3.0)),
    Case(reads_function, lambda m: setattr(with_attribute, "factor", 3.0)),
    Case(reads_range, lambda m: setattr(m, "range", range(0, 4, 2))),
    Case(reads_slice, lambda m: setattr(m, "slice", slice(0, 3.0))),
    Case(calls_keyword, lambda m: (keyword.__kwdefaults__ or {}).update(factor=3.0)),
    Case(calls_net, put_property("net")),
    Case(iterates, put_property("blocks")),
    Case(clears),
    Case(inserts),
    Case(mode_after),
    Case(buffer_around),
    Case(weight_before),
    Case(rate_after, assigning),
    Case(rate_after, lambda m: setattr(m.keeps, "rate", 3.0)),
    Case(factor_after, lambda m: m.drop.register_forward_hook(bump(m))),
    Case(factor_after, lambda m: m.fc.register_forward_hook(bump(m))),
    *(Case(forward) for forward in (second_self, argument_inf)),
    Case(keyword_child),
]


def compare(fused: Any, plain: Any) -> None:
    for _ in range(2):
        x = torch.randn(9, WIDTH)
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    yield
    Activation.RELU.factor = 2.0
    with_attribute.factor = 2.0  # type: ignore[attr-defined]
    keyword.__kwdefaults__ = {"factor": 2.0}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.forward.__name__)
def test_what_torch_compile_gives(case: Case) -> None:
    plain = type("Model", (Base,), {"forward": case.forward})()
    fused, compiled = fuse_eagerly(copy.deepcopy(plain), inplace=True), compile_eagerly(plain)
    compare(fused, compiled)
    assert fused.fusion_report.sites, fused.fusion_report
    case.change(plain), case.change(fused)
    compare(fused, compiled)


def test_a_negative_base() -> None:
    """Of torch.compile's own graphs the code is `-2.0 ** z`."""
    plain = type("Model", (Base,), {"forward": negative_base})()
    compare(fuse_eagerly(plain), plain)


def test_lists_that_are_given_back() -> None:
    kind = type("Model", (Base,), {"forward": lambda self, x: (torch.relu(self.fc(x)), self.steps)})
    fused: Any = fuse_eagerly(kind())
    assert fused(torch.randn(9, WIDTH))[1] is fused.steps
