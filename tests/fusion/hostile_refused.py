"""Forwards whose result depends on something that is hard to watch; they are not fused."""

from __future__ import annotations

import itertools
import random
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fusion.hostile import WIDTH, Case, put, set_in
from tests.fusion.hostile_allowed import Bumps, Quiet, global_after_loud_child, reads_after_loud_child

FACTOR: Any = 2.0
STEPS = [1.0, 2.0]
CONFIG = types.SimpleNamespace(factor=2.0)
COUNTER = itertools.count()


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return set_in(globals(), name, value)


def draws(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * random.random()


def draws_a_tensor(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * torch.rand(WIDTH)


def counts(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) + next(COUNTER)


def reads_time(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) + (1 if time.time() > 0 else 0)


def global_list(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * STEPS[0]


def global_config(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * CONFIG.factor


def swallows(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    try:
        return z if z.sum() > 0 else -z
    except Exception:
        return z * 100


def swallows_inside(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (3 if quietly(lambda: bool(x.sum() > 0)) else 5)


def quietly(function: Callable[[], bool]) -> bool:
    try:
        return function()
    except Exception:
        return False


def asks_exact_type(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (2 if type(x) is Tensor else 3)


def asks_class(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (2 if x.__class__ is Tensor else 3)


def defaults_of_getattr(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * getattr(self, "later", 2.0)


def asks_hasattr(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (3.0 if hasattr(self, "later") else 2.0)


def asks_for_a_gradient(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return z if x.grad_fn is None else z * 2


def asks_identity(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return z if self.fc is self.second else z * 2


def requires_identity(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    return z * 2 if x.requires_grad is False else z


def stores(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    self.cache.append(1)
    return z * len(self.cache)


def stores_items(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    self.config["factor"] += 1.0
    return z * self.config["factor"]


def stores_globally(self: Any, x: Tensor) -> Any:
    global FACTOR
    FACTOR = 3.0
    return torch.relu(self.fc(x))


def writes_data(self: Any, x: Tensor) -> Any:
    z = torch.relu(self.fc(x))
    x.data = x.data * 2
    return z


def loud(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(self.child(x))) * self.child.count


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor, seen: Any = None) -> Any:
        self.count += 1
        if seen is not None:
            seen.append(x)
        return None if self.count % 2 else x


def gives_lists(self: Any, x: Tensor) -> Any:
    seen: list[Any] = []
    self.child(x, seen)
    return torch.relu(self.fc(x)) * len(seen)


def compares_results(self: Any, x: Tensor) -> Any:
    found = self.child(x)
    if found is None:
        found = x * 3
    return torch.relu(self.fc(found))


def reads_outside(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(self.outside[0](x)))


def reads_plain(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) + self.plain


def reads_parameters(self: Any, x: Tensor) -> Any:
    for parameter in self.fc.parameters():
        x = x + parameter.mean()
    return torch.relu(self.fc(x))


def reads_dict(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.__dict__["factor"]


def formats(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * len(f"{x.shape[0]}")


def wrong_class(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) if super(type(self), self).training else self.fc(x)


def asks_for_modes(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (1 if torch.is_grad_enabled() else 2)


def blocks_gradients(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.relu(self.fc(x))


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x))


def imports(self: Any, x: Tensor) -> Any:
    import random

    return torch.relu(self.fc(x)) * random.random()


def looks_up(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * {self.fc: 1, self.second: 2}[self.fc]


def compares_modules(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (1 if self.fc == self.second else 2)


def own_namespace(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * globals()["FACTOR"]


def sets_flag_of_function(self: Any, x: Tensor) -> Any:
    sets_flag_of_function.calls = 1  # type: ignore[attr-defined]
    return torch.relu(self.fc(x))


def looks_up_a_size(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * {9: 2.0}.get(x.shape[0], 1.0)


def appends_to_an_alias(self: Any, x: Tensor) -> Any:
    steps = self.steps
    steps += [2.0]
    return torch.relu(self.fc(x)) * len(steps)


def asks_for_a_gradient_later(self: Any, x: Tensor) -> Any:
    gradient = x.grad_fn
    return torch.relu(self.fc(x)) * 2 if gradient is None else x


def with_child(model: Any) -> None:
    model.child = Counting()
    model.quiet, model.bumps = Quiet(), Bumps()


REFUSED = [
    *(Case(forward, fused=False) for forward in (looks_up_a_size, appends_to_an_alias)),
    Case(asks_for_a_gradient_later, fused=False),
    *(Case(forward, fused=False) for forward in (draws, draws_a_tensor, counts, reads_time, swallows)),
    Case(global_list, lambda m: STEPS.__setitem__(0, 3.0), fused=False),
    Case(global_config, lambda m: setattr(CONFIG, "factor", 3.0), fused=False),
    *(
        Case(forward, fused=False)
        for forward in (swallows_inside, asks_exact_type, asks_class, asks_identity)
    ),
    Case(defaults_of_getattr, put("later", 5.0), fused=False),
    Case(asks_hasattr, put("later", 5.0), fused=False),
    *(
        Case(forward, fused=False)
        for forward in (asks_for_a_gradient, requires_identity, stores, stores_items)
    ),
    *(Case(forward, fused=False) for forward in (stores_globally, writes_data, reads_outside, reads_plain)),
    *(Case(forward, fused=False) for forward in (reads_parameters, formats, wrong_class, asks_for_modes)),
    Case(reads_dict, put("factor", 5.0), fused=False),
    Case(compares_modules, fused=False),
    Case(own_namespace, set_global("FACTOR", 5.0), fused=False),
    *(Case(forward, fused=False) for forward in (blocks_gradients, decorated, imports, looks_up)),
    *(Case(forward, fused=False) for forward in (reads_after_loud_child, global_after_loud_child)),
    *(Case(forward, fused=False) for forward in (loud, gives_lists, compares_results, sets_flag_of_function)),
]
