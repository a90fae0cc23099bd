"""What the forwards of `test_hostile.py` are made of: members of a model, and changes of them."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24


class Base(nn.Module):
    """Layers and values for every case."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.table = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.shift: Any = nn.Parameter(torch.randn(WIDTH))
        self.register_parameter("missing", None)
        self.register_buffer("mask", torch.rand(WIDTH))
        self.plain = torch.rand(WIDTH)
        self.factor: Any = 2.0
        self.flag: Any = True
        self.steps: Any = [1.0, 2.0]
        self.config: Any = {"factor": 2.0, "deep": [1.0]}
        self.function: Any = F.relu
        self.first_of = [self.fc, self.second]
        self.outside = [nn.Linear(WIDTH, WIDTH)]
        self.cache: list[Any] = []

    @property
    def gain(self) -> Any:
        return self.factor * 3

    def helper(self, z: Tensor) -> Tensor:
        return torch.relu(z) * self.factor  # type: ignore[no-any-return]

    @staticmethod
    def doubled(z: Tensor) -> Tensor:
        return z * 2


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value() if callable(value) else value)


def put_in_class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(original(model), name, value)


def original(model: nn.Module) -> Any:
    return type(model)


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A forward, a change, and whether it can be fused."""

    forward: Callable[..., Any]
    change: Callable[[Any], Any] = nothing
    fused: bool = True
    members: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        members = {name: fresh(function) for name, function in self.members.items()}
        return type("Model", (Base,), {"forward": fresh(self.forward), **members})


def forward_of(value: str, scope: dict[str, Any]) -> Any:
    """A forward of (self, x) with this value, which reads the globals of a module; its name is the value."""
    made = eval(f"lambda self, x: {value}", scope)
    made.__name__ = value
    return made


def fresh(function: Any) -> Any:
    """The function once more, with a closure of its own, for what a case changes in it."""
    closure = tuple(types.CellType(cell.cell_contents) for cell in function.__closure__ or ())
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def new_layer() -> nn.Linear:
    generator = torch.Generator().manual_seed(7)
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)
    return layer


def new_parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, WIDTH))


def set_in(scope: dict[str, Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: scope.__setitem__(name, value)
