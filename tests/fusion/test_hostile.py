"""Forwards that depend on more than their inputs, and what changes between two calls: never another result.

Each model is called before and after the change, fused and not. Where `fused` is True, the model must have run fused
before the change, so that refusing everything does not pass; where it is False, it must have been refused.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import fusion
from tests.fusion.test_spellings import report_of

WIDTH = 24
FACTOR: Any = 2.0
ZERO: Any = 0.0
HUGE = 10**400
STEPS = [1.0, 2.0]
CONFIG = types.SimpleNamespace(factor=2.0)
COUNTER = itertools.count()


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


def ordinary(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.relu(z) * factor


def other(z: Tensor, factor: float = 2.0) -> Tensor:
    return torch.sigmoid(z) * factor


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value() if callable(value) else value)


def put_in_class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(original(model), name, value)


def original(model: nn.Module) -> Any:
    return getattr(type(model), "_epigemm_original", type(model))


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A forward, a change, and whether it can be fused."""

    forward: Callable[..., Any]
    change: Callable[[Any], Any] = nothing
    fused: bool = True
    members: dict[str, Any] = field(default_factory=dict)
    still: bool | None = None  # whether it runs fused after the change; None: either

    def make(self) -> Any:
        members = {name: fresh(function) for name, function in self.members.items()}
        return type("Model", (Base,), {"forward": fresh(self.forward), **members})


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


# --- ordinary forwards ------------------------------------------------------------------------------------------------


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


def calls_helpers(self: Any, x: Tensor) -> Any:
    return self.doubled(self.helper(self.fc(x))) + ordinary(self.second(x), factor=3.0) + self.gain


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


def casts_types(self: Any, x: Tensor) -> Any:
    layer = cast(nn.Linear, self.fc)
    return torch.relu(layer(x))


def reads_factor(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.factor


def reads_global(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * FACTOR


def reads_zero(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) / (ZERO if ZERO == ZERO else 1.0)


def signed_zero(self: Any, x: Tensor) -> Any:
    return 1 / (torch.relu(self.fc(x)) * 0 + 1) / self.factor


def reads_huge(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) + (1 if HUGE > 5 else 0)


def multiplies_by_huge(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) / self.factor


def reads_lists(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.steps[1] + self.config["factor"] + self.config["deep"][0]


def first_relu(self: Any, x: Tensor) -> Any:
    return F.relu(self.fc(x))


def calls_function(self: Any, x: Tensor) -> Any:
    return self.function(self.fc(x))


def calls_ordinary(self: Any, x: Tensor) -> Any:
    return ordinary(self.fc(x))


def calls_helper(self: Any, x: Tensor) -> Any:
    return self.helper(self.fc(x))


def reads_gain(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.gain


def reads_class(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.scale


def shares(self: Any, x: Tensor) -> Any:
    return torch.relu(self.second(torch.relu(self.fc(x))))


def listed_layers(self: Any, x: Tensor) -> Any:
    for layer in self.first_of:
        x = torch.relu(layer(x))
    return x


def calls_net(self: Any, x: Tensor) -> Any:
    return torch.sigmoid(self.net(x)) + self.fc(x)


def reads_blocks(self: Any, x: Tensor) -> Any:
    for layer in self.blocks:
        x = torch.relu(layer(x))
    return x


def tie(model: Any) -> None:
    model.second.weight = model.fc.weight


def around(factor: float) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.relu(self.fc(x)) * factor

    return forward


def change_cell(model: Any) -> None:
    original(model).forward.__closure__[0].cell_contents = 5.0


def change_code(model: Any) -> None:
    original(model).helper.__code__ = (lambda self, z: torch.sigmoid(z)).__code__


def change_defaults(model: Any) -> None:
    ordinary.__defaults__ = (7.0,)


def share(model: Any) -> None:
    model.second = model.fc


def to_double(model: Any) -> None:
    model.double()


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


def global_after_loud_child(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(self.bumps(x))) * FACTOR


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
    Case(raises, put("factor", 0), still=False),
    Case(keyed),
    Case(listed_functions, put("flag", False), still=False),
    Case(loops),
    Case(unpacks),
    Case(calls_helpers),
    Case(checks_bias),
    Case(checks_bias_of_child),
    Case(two_outputs),
    Case(modes, lambda model: model.train(), still=True),
    Case(tables),
    Case(asks_for_kinds),
    Case(nested_functions),
    Case(casts_types),
    Case(calls_net),
]
CHANGES = [
    Case(reads_factor, put("factor", 3.0), still=False),
    Case(reads_factor, put("factor", 2), still=False),
    Case(reads_factor, put("factor", True), still=False),
    Case(reads_factor, put("factor", math.nan), still=False),
    Case(reads_factor, lambda m: m.register_buffer("factor", m.__dict__.pop("factor") * torch.ones(WIDTH))),
    Case(signed_zero, put("factor", -0.0)),
    Case(reads_global, set_global("FACTOR", 3.0), still=False),
    Case(reads_global, set_global("FACTOR", torch.tensor(3.0)), still=False),
    Case(reads_zero, set_global("ZERO", -0.0), still=False),
    Case(reads_zero, set_global("ZERO", math.nan), still=False),
    Case(reads_huge, set_global("HUGE", 1), still=False),
    Case(multiplies_by_huge, put("factor", math.inf), still=False),
    Case(reads_lists, lambda m: m.steps.__setitem__(1, 5.0), still=False),
    Case(reads_lists, lambda m: m.config["deep"].__setitem__(0, 9.0), still=False),
    Case(reads_lists, lambda m: m.config.update(factor=-0.0), still=False),
    Case(calls_function, put("function", lambda: torch.sigmoid), still=False),
    Case(calls_ordinary, set_global("ordinary", other), still=False),
    Case(calls_ordinary, change_defaults, still=False),
    Case(calls_helper, put_in_class("helper", lambda self, z: torch.sigmoid(z)), still=False),
    Case(calls_helper, lambda m: m.__dict__.update(helper=torch.tanh), still=False),
    Case(calls_helper, change_code, members={"helper": lambda self, z: torch.relu(z)}, still=False),
    Case(reads_gain, put("factor", 5.0), still=False),
    Case(reads_gain, put_in_class("gain", 5.0), still=False),
    Case(reads_class, put_in_class("scale", 5.0), still=False),
    Case(reads_class, put("scale", 5.0), still=False),
    Case(first_relu, put_in_class("forward", reads_factor)),
    Case(first_relu, put("forward", lambda: lambda x: x * 2)),
    Case(around(2.0), change_cell, still=False),
    Case(checks_bias, put("shift", lambda: None), still=False),
    Case(checks_bias, put("missing", new_parameter), still=False),
    Case(checks_bias_of_child, lambda m: setattr(m.fc, "bias", None), still=False),
    Case(first_relu, put("fc", new_layer), still=True),
    Case(first_relu, lambda m: setattr(m.fc, "weight", nn.Parameter(torch.eye(WIDTH))), still=True),
    Case(first_relu, lambda m: setattr(m, "fc", nn.Sequential(new_layer(), nn.Tanh()))),
    Case(first_relu, lambda m: setattr(m.fc, "forward", lambda x: x * 2)),
    Case(shares, share, still=True),
    Case(shares, tie, still=True),
    Case(listed_layers, put("fc", new_layer)),
    Case(listed_layers, lambda m: m.first_of.reverse(), still=False),
    Case(asks_for_kinds, put("second", lambda: nn.Sequential(new_layer())), still=False),
    Case(calls_net, lambda m: m.net.append(new_layer()), still=False),
    Case(calls_net, lambda m: m.net.__setitem__(0, new_layer()), still=True),
    Case(calls_net, put("net", lambda: nn.ModuleList([new_layer()])[0]), still=False),
    Case(calls_net, lambda m: m.net.register_forward_hook(lambda *a: a[2] * 2), still=False),
    Case(reads_blocks, lambda m: m.blocks.append(new_layer()), still=False),
    Case(reads_blocks, lambda m: setattr(m.blocks, "0", new_layer()), still=True),
    Case(tables, lambda m: m.table.pop("a") and m.table.update({"c": new_layer()}), still=False),
    Case(first_relu, to_double),
    Case(first_relu, lambda m: m.half()),
    Case(loops, lambda m: m.steps.append(3.0) or m.blocks.append(new_layer()), still=False),
]


# --- forwards that must be refused ------------------------------------------------------------------------------------


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
    Case(asks_identity, share, fused=False),
    Case(compares_modules, share, fused=False),
    Case(own_namespace, set_global("FACTOR", 5.0), fused=False),
    *(Case(forward, fused=False) for forward in (blocks_gradients, decorated, imports, looks_up)),
    *(Case(forward, fused=False) for forward in (reads_after_loud_child, global_after_loud_child)),
    *(Case(forward, fused=False) for forward in (loud, gives_lists, compares_results, sets_flag_of_function)),
]


@pytest.fixture(autouse=True)
def globals_as_they_were() -> Any:
    saved = {name: globals()[name] for name in ("FACTOR", "ZERO", "HUGE", "ordinary")}
    defaults = ordinary.__defaults__
    yield
    globals().update(saved)
    ordinary.__defaults__ = defaults
    STEPS[:], CONFIG.factor = [1.0, 2.0], 2.0


def called(model: Any, x: Tensor) -> Any:
    global COUNTER
    torch.manual_seed(0), random.seed(0)
    COUNTER = itertools.count()
    return model(x.clone())


def compare(fused: Any, plain: Any, x: Tensor) -> list[tuple[str, str]]:
    with fusion.watch() as unfused:
        for _ in range(2):
            try:
                expected = called(plain, x)
            except Exception as error:
                with pytest.raises(type(error)):
                    called(fused, x)
                continue
            bound = 1e-2 if x.dtype is torch.float16 else 1e-4
            torch.testing.assert_close(called(fused, x), expected, rtol=bound, atol=bound, equal_nan=True)
    return unfused


def identity(case: Case) -> str:
    return f"{case.forward.__name__}-{getattr(case.change, '__name__', '')}"


@pytest.mark.parametrize("case", [*ORDINARY, *CHANGES, *REFUSED], ids=identity)
@pytest.mark.parametrize("inplace", [True, False], ids=["in_place", "copied"])
def test_never_another_result(case: Case, inplace: bool) -> None:
    kind = case.make()
    plain, model = kind().eval(), kind().eval()
    for made in (plain, model):
        with_child(made)
    model.load_state_dict(plain.state_dict())
    model.plain, model.outside[0].weight, model.outside[0].bias = (
        plain.plain,
        plain.outside[0].weight,
        plain.outside[0].bias,
    )
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    fused = epigemm.fuse(model, inplace=inplace)
    assert {name: vars(model)[name] for name in before} == before  # nothing is left behind
    sites = [site for site in report_of(fused).sites if not site.name.startswith(("net: ", "quiet: "))]
    assert bool(sites) is case.fused, report_of(fused)
    x = torch.randn(9, WIDTH)
    assert compare(fused, plain, x) == [] or not case.fused
    case.change(plain), case.change(fused)
    for rows in (9, 1):
        unfused = compare(fused, plain, torch.randn(rows, WIDTH).to(fused.mask.dtype))
        if case.still is not None:
            assert (unfused == []) is case.still, unfused
