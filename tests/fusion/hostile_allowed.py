"""Forwards that are fused, alone and with what changes between two calls; and what these are made of."""

from __future__ import annotations

import math
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


# --- the forwards -----------------------------------------------------------------------------------------------------

FACTOR: Any = 2.0
ZERO: Any = 0.0
HUGE = 10**400


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return set_in(globals(), name, value)


def ordinary(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.relu(z) * factor


def other(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.sigmoid(z) * factor


def of(value: str) -> Any:
    """A forward with this value."""
    return forward_of(value, globals())


def loops(self: Any, x: Tensor) -> Tensor:
    outputs = []
    for index, (layer, step) in enumerate(zip(self.blocks, self.steps, strict=True)):
        x = torch.relu(layer(x)) * step + index
        outputs.append(x)
    for layer in self.blocks[1:]:
        x = layer(x)
    for layer in reversed(self.blocks):
        x = layer(x)
    total = sum([output.mean() for output in outputs])
    return torch.cat(outputs, dim=-1).view(x.shape[0], -1) * total + len(self.blocks) + max(1, 2)


def unpacks(self: Any, x: Tensor) -> Tensor:
    n, c = x.shape
    a, b = torch.relu(self.fc(x)).chunk(2, dim=-1)
    return torch.cat([a, b], -1).reshape(n, c) / math.sqrt(c) + math.sqrt(4.0) + math.pi


def checks_bias(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    if self.missing is not None:
        z = z * self.missing
    return z + self.shift if self.shift is not None else z - 1


def checks_bias_of_child(self: Any, x: Tensor) -> Any:
    z = torch.relu(F.linear(x, self.fc.weight, self.fc.bias))
    return z if self.fc.bias is not None else z * 3


def two_outputs(self: Any, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
    z = torch.relu(self.fc(x)) * scale
    if mask is not None:
        z = z * mask
    return {"z": z, "parts": (z + 1, [z, self.flag, None])}


def modes(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return F.dropout(z, 0.5, self.training) * 2 if self.training else z


def tables(self: Any, x: Tensor) -> Any:
    for name, layer in self.table.items():
        x = torch.relu(layer(x)) if name == "a" else layer(x)
    return x + len(self.table) + self.table["b"](x)


def asks_for_kinds(self: Any, x: Tensor) -> Any:
    for layer in (self.fc, self.second, *self.blocks):
        x = torch.relu(layer(x)) if isinstance(layer, (nn.Linear, nn.Conv2d)) else layer(x) * 2
    return x


def nested_functions(self: Any, x: Tensor) -> Any:
    def scaled(z: Tensor) -> Any:
        return z * self.factor

    return scaled(torch.relu(self.fc(x))) + sum(scaled(layer(x)) for layer in self.blocks)


def listed_layers(self: Any, x: Tensor) -> Any:
    for layer in self.first_of:
        x = torch.relu(layer(x))
    return x


def reads_blocks(self: Any, x: Tensor) -> Any:
    for layer in self.blocks:
        x = torch.relu(layer(x))
    return x


reads_factor = of("torch.relu(self.fc(x)) * self.factor")
reads_global = of("torch.relu(self.fc(x)) * FACTOR")
reads_lists = of('torch.relu(self.fc(x)) * self.steps[1] + self.config["factor"] + self.config["deep"][0]')
first_relu = of("F.relu(self.fc(x))")
calls_ordinary = of("ordinary(self.fc(x))")
calls_helper = of("self.helper(self.fc(x))")
shares = of("torch.relu(self.second(torch.relu(self.fc(x))))")
calls_net = of("torch.sigmoid(self.net(x)) + self.fc(x)")
global_after_loud_child = of("torch.relu(self.fc(self.bumps(x))) * FACTOR")


def around(factor: float) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.relu(self.fc(x)) * factor

    return forward


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.rate = nn.Linear(WIDTH, WIDTH), 0.5

    def forward(self, x: Tensor) -> Any:
        n, c = x.shape
        return F.relu(self.fc(x)).view(n, c) * self.rate / math.sqrt(c)


def bump(module: Any) -> float:
    module.rate += 1.0
    return 1.0


class Bumps(Quiet):
    def forward(self, x: Tensor) -> Any:
        return F.relu(self.fc(x)) * bump(self)


def reads_after_child(self: Any, x: Tensor) -> Any:
    x = self.quiet(x)
    return torch.relu(self.fc(x)) * self.quiet.rate * FACTOR


def reads_after_loud_child(self: Any, x: Tensor) -> Any:
    x = self.bumps(x)
    return torch.relu(self.fc(x)) * self.bumps.rate


def raises(self: Any, x: Tensor) -> Any:
    if self.factor == 0:
        raise ValueError(f"factor is {self.factor}")
    return torch.relu(self.fc(x)) / self.factor


def keyed(self: Any, x: Tensor) -> Any:
    found = {"a": torch.relu(self.fc(x))}
    found["b"] = found["a"] * 2
    a, b = [found[key] for key in ("a", "b")]
    a += b
    a[0].mul_(1)
    return sum((a, b)) + self.factor


def listed_functions(self: Any, x: Tensor) -> Any:
    for function in (torch.relu, F.relu, torch.sigmoid):
        x = function(self.fc(x))
    act = torch.relu if self.flag else torch.sigmoid
    return act(self.second(x))


ORDINARY = [
    Case(reads_after_child),
    Case(raises, put("factor", 0)),
    Case(keyed),
    Case(listed_functions, put("flag", False)),
    Case(loops),
    Case(unpacks),
    Case(of("self.doubled(self.helper(self.fc(x))) + ordinary(self.second(x), factor=3.0) + self.gain")),
    Case(checks_bias),
    Case(checks_bias_of_child),
    Case(two_outputs),
    Case(modes, lambda model: model.train()),
    Case(tables),
    Case(asks_for_kinds),
    Case(nested_functions),
    Case(calls_net),
]
CHANGES = [
    Case(reads_factor, put("factor", 3.0)),
    Case(reads_factor, put("factor", True)),
    Case(reads_factor, put("factor", math.nan)),
    Case(reads_factor, lambda m: m.register_buffer("factor", m.__dict__.pop("factor") * torch.ones(WIDTH))),
    Case(reads_global, set_global("FACTOR", 3.0)),
    Case(reads_global, set_global("FACTOR", torch.tensor(3.0))),
    Case(of("torch.relu(self.fc(x)) / (ZERO if ZERO == ZERO else 1.0)"), set_global("ZERO", math.nan)),
    Case(of("torch.relu(self.fc(x)) + (1 if HUGE > 5 else 0)"), set_global("HUGE", 1)),
    Case(reads_lists, lambda m: m.config["deep"].__setitem__(0, 9.0)),
    Case(reads_lists, lambda m: m.config.update(factor=-0.0)),
    Case(of("self.function(self.fc(x))"), put("function", lambda: torch.sigmoid)),
    Case(calls_ordinary, set_global("ordinary", other)),
    Case(calls_ordinary, lambda m: setattr(ordinary, "__defaults__", (7.0,))),
    Case(calls_helper, put_in_class("helper", lambda self, z: torch.sigmoid(z))),
    Case(
        calls_helper,
        lambda m: setattr(original(m).helper, "__code__", (lambda self, z: torch.sigmoid(z)).__code__),
        members={"helper": lambda self, z: torch.relu(z)},
    ),
    Case(of("torch.relu(self.fc(x)) * self.gain"), put_in_class("gain", 5.0)),
    Case(of("torch.relu(self.fc(x)) * self.scale"), put_in_class("scale", 5.0)),
    Case(first_relu, put_in_class("forward", reads_factor)),
    Case(first_relu, put("forward", lambda: lambda x: x * 2)),
    Case(around(2.0), lambda m: setattr(original(m).forward.__closure__[0], "cell_contents", 5.0)),
    Case(checks_bias, put("shift", lambda: None)),
    Case(checks_bias, put("missing", new_parameter)),
    Case(checks_bias_of_child, lambda m: setattr(m.fc, "bias", None)),
    Case(first_relu, put("fc", new_layer)),
    Case(first_relu, lambda m: setattr(m.fc, "weight", nn.Parameter(torch.eye(WIDTH)))),
    Case(first_relu, lambda m: setattr(m, "fc", nn.Sequential(new_layer(), nn.Tanh()))),
    Case(first_relu, lambda m: setattr(m.fc, "forward", lambda x: x * 2)),
    Case(shares, lambda m: setattr(m, "second", m.fc)),
    Case(shares, lambda m: setattr(m.second, "weight", m.fc.weight)),
    Case(listed_layers, lambda m: m.first_of.reverse()),
    Case(asks_for_kinds, put("second", lambda: nn.Sequential(new_layer()))),
    Case(calls_net, lambda m: m.net.__setitem__(0, new_layer())),
    Case(calls_net, put("net", lambda: nn.ModuleList([new_layer()])[0])),
    Case(calls_net, lambda m: m.net.register_forward_hook(lambda *a: a[2] * 2)),
    Case(reads_blocks, lambda m: m.blocks.append(new_layer())),
    Case(reads_blocks, lambda m: setattr(m.blocks, "0", new_layer())),
    Case(tables, lambda m: m.table.pop("a") and m.table.update({"c": new_layer()})),
    Case(first_relu, lambda m: m.half()),
    Case(loops, lambda m: m.steps.append(3.0) or m.blocks.append(new_layer())),
]
