"""Forwards that read more than their inputs, and what changes between two calls of them.

A line is a forward of (self, x), and behind ` => ` what is done to the model `m` then; `; ` separates statements.
"""

from __future__ import annotations

import itertools
import math
import random  # noqa: F401 # of forwards that are texts, as time
import time  # noqa: F401
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24
FACTOR: Any = 2.0
ZERO: Any = 0.0
HUGE = 10**400
STEPS = [1.0, 2.0]
COUNTER = itertools.count()


def ordinary(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.relu(z) * factor


def other(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.sigmoid(z) * factor


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


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return None if self.count % 2 else x


class Base(nn.Module):
    """Layers and values for every case."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.table = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.child, self.quiet, self.bumps = Counting(), Quiet(), Bumps()
        self.shift: Any = nn.Parameter(torch.randn(WIDTH))
        self.register_parameter("missing", None)
        self.register_buffer("mask", torch.rand(WIDTH))
        self.plain, self.factor, self.flag = torch.rand(WIDTH), 2.0, True
        self.steps: Any = [1.0, 2.0]
        self.config: Any = {"factor": 2.0, "deep": [1.0]}
        self.function: Any = F.relu
        self.first_of, self.outside = [self.fc, self.second], [nn.Linear(WIDTH, WIDTH)]
        self.cache: list[Any] = []

    @property
    def gain(self) -> Any:
        return self.factor * 3

    def helper(self, z: Tensor) -> Tensor:
        return torch.relu(z) * self.factor

    @staticmethod
    def doubled(z: Tensor) -> Tensor:
        return z * 2


@dataclass(frozen=True)
class Case:
    """A forward, a change, and whether something is fused before it."""

    forward: Any
    change: str
    fused: bool

    def __str__(self) -> str:
        return f"{getattr(self.forward, '__name__', self.forward)} => {self.change}"

    def make(self) -> Any:
        """A class, whose functions a change may change."""
        forward = written(self.forward) if isinstance(self.forward, str) else self.forward
        return type("Model", (Base,), {"forward": fresh(forward), "helper": fresh(Base.helper)})

    def apply(self, model: Any) -> None:
        scope = globals()
        scope["m"] = model
        exec(self.change.replace("; ", "\n"), scope)


def written(text: str) -> Callable[..., Any]:
    """The forward of a text, which reads the globals of this module."""
    scope = globals()
    exec("def _forward(self, x):\n" + "".join(f"    {line}\n" for line in text.split("; ")), scope)
    made: Callable[..., Any] = scope["_forward"]
    return made


def fresh(function: Any) -> Any:
    """The function once more, with a closure of its own, for what a case changes in it."""
    closure = tuple(types.CellType(cell.cell_contents) for cell in function.__closure__ or ())
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )


def new_layer() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(7))
    return layer


def around(factor: float) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.relu(self.fc(x)) * factor

    return forward


def swallows(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    try:
        return z if z.sum() > 0 else -z
    except Exception:
        return z * 100


FUSED = """
x = self.quiet(x); return torch.relu(self.fc(x)) * self.quiet.rate * FACTOR
if self.factor == 0: raise ValueError(f"factor is {self.factor}"); return torch.relu(self.fc(x)) / self.factor => m.factor = 0
d = {"a": torch.relu(self.fc(x))}; d["b"] = d["a"] * 2; a, b = [d[k] for k in "ab"]; a += b; a[0].mul_(1); return sum((a, b)) + self.factor
for each in (torch.relu, F.relu, torch.sigmoid): x = each(self.fc(x)); return (torch.relu if self.flag else torch.sigmoid)(self.second(x)) => m.flag = False
s = []; for i, (each, step) in enumerate(zip(self.blocks, self.steps)): s.append(x := torch.relu(each(x)) * step + i); for each in (*self.blocks[1:], *reversed(self.blocks)): x = each(x); return torch.cat(s, -1).view(len(x), -1) * sum([y.mean() for y in s]) + len(self.blocks) + max(1, 2)
s = []; for each, step in zip(self.blocks, self.steps): s.append(x := torch.relu(each(x)) * step); return torch.cat(s, -1) + len(self.steps) => m.steps.append(3.0); m.blocks.append(new_layer())
n, c = x.shape; a, b = torch.relu(self.fc(x)).chunk(2, dim=-1); return torch.cat([a, b], -1).reshape(n, c) / math.sqrt(c) + math.sqrt(4.0) + math.pi
return self.doubled(self.helper(self.fc(x))) + ordinary(self.second(x), factor=3.0) + self.gain
z = torch.relu(self.fc(x)); return {"z": z, "parts": (z + 1, [z, self.flag, None])}
z = torch.relu(self.fc(x)); return F.dropout(z, 0.5, self.training) * 2 if self.training else z => m.train()
def scaled(z): return z * self.factor; return scaled(torch.relu(self.fc(x))) + sum(scaled(each(x)) for each in self.blocks)
return torch.relu(self.fc(x)) * self.factor => m.factor = 3.0
return torch.relu(self.fc(x)) * self.factor => m.factor = True
return torch.relu(self.fc(x)) * self.factor => m.factor = math.nan
return torch.relu(self.fc(x)) * self.factor => m.register_buffer("factor", m.__dict__.pop("factor") * torch.ones(WIDTH))
return torch.relu(self.fc(x)) * FACTOR => FACTOR = 3.0
return torch.relu(self.fc(x)) * FACTOR => FACTOR = torch.tensor(3.0)
return torch.relu(self.fc(x)) / (ZERO if ZERO == ZERO else 1.0) => ZERO = math.nan
return torch.relu(self.fc(x)) + (1 if HUGE > 5 else 0) => HUGE = 1
return torch.relu(self.fc(x)) * self.steps[1] + self.config["factor"] + self.config["deep"][0] => m.config["deep"][0] = 9.0
return torch.relu(self.fc(x)) * self.steps[1] + self.config["factor"] + self.config["deep"][0] => m.config["factor"] = -0.0
return self.function(self.fc(x)) => m.function = torch.sigmoid
return ordinary(self.fc(x)) => ordinary = other
return ordinary(self.fc(x)) => ordinary.__defaults__ = (7.0,)
return self.helper(self.fc(x)) => type(m).helper = lambda self, z: torch.sigmoid(z)
return self.helper(self.fc(x)) => type(m).helper.__code__ = (lambda self, z: torch.sigmoid(z)).__code__
return torch.relu(self.fc(x)) * self.gain => type(m).gain = 5.0
return torch.relu(self.fc(x)) * self.scale => type(m).scale = 5.0
return F.relu(self.fc(x)) => type(m).forward = written("return torch.relu(self.fc(x)) * self.factor")
return F.relu(self.fc(x)) => m.forward = lambda x: x * 2
z = torch.relu(self.fc(x)); return z + self.shift if self.shift is not None else z - 1 => m.shift = None
z = torch.relu(self.fc(x)); return z if self.missing is None else z * self.missing => m.missing = nn.Parameter(torch.linspace(-1, 1, WIDTH))
z = torch.relu(F.linear(x, self.fc.weight, self.fc.bias)); return z if self.fc.bias is not None else z * 3 => m.fc.bias = None
return F.relu(self.fc(x)) => m.fc = new_layer()
return F.relu(self.fc(x)) => m.fc.weight = nn.Parameter(torch.eye(WIDTH))
return F.relu(self.fc(x)) => m.fc = nn.Sequential(new_layer(), nn.Tanh())
return F.relu(self.fc(x)) => m.fc.forward = lambda x: x * 2
return F.relu(self.fc(x)) => m.half()
return torch.relu(self.second(torch.relu(self.fc(x)))) => m.second = m.fc
return torch.relu(self.second(torch.relu(self.fc(x)))) => m.second.weight = m.fc.weight
for each in self.first_of: x = torch.relu(each(x)); return x => m.first_of.reverse()
for each in (self.fc, self.second, *self.blocks): x = torch.relu(each(x)) if isinstance(each, (nn.Linear, nn.Conv2d)) else each(x) * 2; return x => m.second = nn.Sequential(new_layer())
return torch.sigmoid(self.net(x)) + self.fc(x) => m.net[0] = new_layer()
return torch.sigmoid(self.net(x)) + self.fc(x) => m.net = nn.ModuleList([new_layer()])[0]
return torch.sigmoid(self.net(x)) + self.fc(x) => m.net.register_forward_hook(lambda *given: given[2] * 2)
for each in self.blocks: x = torch.relu(each(x)); return x => m.blocks.append(new_layer())
for each in self.blocks: x = torch.relu(each(x)); return x => setattr(m.blocks, "0", new_layer())
for name, each in self.table.items(): x = torch.relu(each(x)) if name == "a" else each(x); return x + len(self.table) + self.table["b"](x) => m.table.pop("a"); m.table.update({"c": new_layer()})
"""  # noqa: E501
NOT_FUSED = """
return torch.relu(self.fc(x)) * random.random()
return torch.relu(self.fc(x)) * torch.rand(WIDTH)
return torch.relu(self.fc(x)) + next(COUNTER)
return torch.relu(self.fc(x)) + (1 if time.time() > 0 else 0)
return torch.relu(self.fc(x)) * (2 if type(x) is Tensor else 3)
return torch.relu(self.fc(self.outside[0](x)))
return torch.relu(self.fc(x)) * len(f"{x.shape[0]}")
return torch.relu(self.fc(x)) if super(type(self), self).training else self.fc(x)
return torch.relu(self.fc(x)) * (1 if torch.is_grad_enabled() else 2)
return torch.relu(self.fc(self.child(x))) * self.child.count
y = self.child(x); return torch.relu(self.fc(x * 3 if y is None else y))
z = torch.relu(self.fc(x)); return z if x.grad_fn is None else z * 2
z = torch.relu(self.fc(x)); return z if self.fc is self.second else z * 2
z = torch.relu(self.fc(x)); self.cache.append(1); return z * len(self.cache)
global FACTOR; FACTOR = 3.0; return torch.relu(self.fc(x))
z = torch.relu(self.fc(x)); x.data = x.data * 2; return z
with torch.no_grad(): return torch.relu(self.fc(x))
ordinary.calls = 1; return torch.relu(self.fc(x))
x = self.bumps(x); return torch.relu(self.fc(x)) * self.bumps.rate
return torch.relu(self.fc(self.bumps(x))) * FACTOR
return torch.relu(self.fc(x)) * STEPS[0] => STEPS[0] = 3.0
return torch.relu(self.fc(x)) * getattr(self, "later", 2.0) => m.later = 5.0
return torch.relu(self.fc(x)) * self.__dict__["factor"] => m.factor = 5.0
"""


def cases() -> list[Case]:
    made = [Case(around(2.0), "type(m).forward.__closure__[0].cell_contents = 5.0", fused=True)]
    for lines, is_fused in ((FUSED, True), (NOT_FUSED, False)):
        for line in lines.strip().splitlines():
            forward, _, change = line.partition(" => ")
            made.append(Case(forward, change, is_fused))
    return [*made, Case(swallows, "", fused=False)]
