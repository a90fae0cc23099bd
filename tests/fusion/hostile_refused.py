"""Forwards whose result depends on something that is hard to watch; they are not fused."""

from __future__ import annotations

import itertools
import random  # noqa: F401 # of forwards that are texts, as time
import time  # noqa: F401
from typing import Any

import torch
from torch import Tensor, nn

from tests.fusion.hostile_allowed import (  # noqa: F401
    WIDTH,
    Bumps,
    Case,
    Quiet,
    forward_of,
    global_after_loud_child,
    put,
    reads_after_loud_child,
)

FACTOR: Any = 2.0
STEPS = [1.0, 2.0]
COUNTER = itertools.count()


def swallows(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    try:
        return z if z.sum() > 0 else -z
    except Exception:
        return z * 100


def asks_for_a_gradient(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return z if x.grad_fn is None else z * 2


def asks_identity(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return z if self.fc is self.second else z * 2


def stores(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    self.cache.append(1)
    return z * len(self.cache)


def stores_globally(self: Any, x: Tensor) -> Any:
    global FACTOR
    FACTOR = 3.0
    return torch.relu(self.fc(x))


def writes_data(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    x.data = x.data * 2
    return z


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor, seen: Any = None) -> Any:
        self.count += 1
        if seen is not None:
            seen.append(x)
        return None if self.count % 2 else x


def compares_results(self: Any, x: Tensor) -> Any:
    found = self.child(x)
    if found is None:
        found = x * 3
    return torch.relu(self.fc(found))


def blocks_gradients(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.relu(self.fc(x))


def sets_flag_of_function(self: Any, x: Tensor) -> Any:
    sets_flag_of_function.calls = 1  # type: ignore[attr-defined]
    return torch.relu(self.fc(x))


def with_child(model: Any) -> None:
    model.child = Counting()
    model.quiet, model.bumps = Quiet(), Bumps()


def of(value: str) -> Any:
    """A forward with this value."""
    return forward_of(value, globals())


VALUES = """
torch.relu(self.fc(x)) * random.random()
torch.relu(self.fc(x)) * torch.rand(WIDTH)
torch.relu(self.fc(x)) + next(COUNTER)
torch.relu(self.fc(x)) + (1 if time.time() > 0 else 0)
torch.relu(self.fc(x)) * (2 if type(x) is Tensor else 3)
torch.relu(self.fc(self.outside[0](x)))
torch.relu(self.fc(x)) * len(f"{x.shape[0]}")
torch.relu(self.fc(x)) if super(type(self), self).training else self.fc(x)
torch.relu(self.fc(x)) * (1 if torch.is_grad_enabled() else 2)
torch.relu(self.fc(self.child(x))) * self.child.count
"""
ALONE = [
    *map(of, VALUES.strip().splitlines()),
    *(swallows, asks_for_a_gradient, asks_identity, stores, stores_globally, writes_data, blocks_gradients),
    *(reads_after_loud_child, global_after_loud_child, compares_results, sets_flag_of_function),
]
REFUSED = [
    *(Case(forward, fused=False) for forward in ALONE),
    Case(of("torch.relu(self.fc(x)) * STEPS[0]"), lambda m: STEPS.__setitem__(0, 3.0), fused=False),
    Case(of("torch.relu(self.fc(x)) * getattr(self, 'later', 2.0)"), put("later", 5.0), fused=False),
    Case(of("torch.relu(self.fc(x)) * self.__dict__['factor']"), put("factor", 5.0), fused=False),
]
