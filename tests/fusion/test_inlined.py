"""Functions that are inlined into graphs: whether a call notices other defaults and other closures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.fusion import inlined
from epigemm.fusion.inlined import Inlined

WIDTH = 4


def scaled(z: Tensor, by: float = 2.0) -> Tensor:
    return z * by


def listed(z: Tensor, by: list[float] = [2.0]) -> Tensor:  # noqa: B006
    return z * by[0]


def keyed(z: Tensor, by: dict[str, float] = {"by": 2.0}) -> Tensor:  # noqa: B006
    return z * by["by"]


def nested(z: Tensor, by: tuple[list[float]] = ([2.0],)) -> Tensor:
    return z * by[0][0]


def named(z: Tensor, *, by: float = 2.0) -> Tensor:
    return z * by


class Box:
    """Of which a forward makes an object."""

    def __init__(self, by: float = 2.0) -> None:
        self.by = by


def times(by: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: z * by


def applies(function: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: function(z)


def method_times(by: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, z: z * by


def forward_times(by: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: torch.relu(self.fc(x)) * by


class Model(nn.Module):
    """Calls a function behind its layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(torch.relu(self.fc(x)))


def with_members(**members: Any) -> nn.Module:
    """Of a class of its own."""
    made: nn.Module = type("Other", (Model,), members)(torch.sigmoid)
    return made


def close_over(function: Any, value: Any) -> None:
    function.__closure__[-1].cell_contents = value


class Case(NamedTuple):
    """A model, and what changes the function `f` that it calls."""

    model: Callable[[Any], nn.Module]
    function: Callable[[], Any]
    change: Callable[[Any], Any]


def set_defaults(*values: Any) -> Callable[[Any], None]:
    return lambda f: setattr(f, "__defaults__", values)


def closing_over(value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda f: close_over(f, value())


def with_named(function: Any, by: float) -> Any:
    function.__kwdefaults__ = {"by": by}
    return function


def same_code(function: Any) -> Any:
    """A new function of the same code and defaults, so that no case changes those of others."""
    return type(function)(function.__code__, globals(), function.__name__, function.__defaults__)


def is_forward(f: Any) -> nn.Module:
    return with_members(forward=f)


def is_method(f: Any) -> nn.Module:
    return with_members(method=f, forward=lambda self, x: self.method(torch.relu(self.fc(x))))


CASES = {
    "default": Case(Model, lambda: same_code(scaled), set_defaults(7.0)),
    "default list": Case(Model, lambda: same_code(listed), set_defaults([7.0])),
    "keyword default": Case(Model, lambda: with_named(same_code(named), 2.0), lambda f: with_named(f, 7.0)),
    "number": Case(Model, lambda: times(2.0), closing_over(lambda: 5.0)),
    "tensor": Case(Model, lambda: times(torch.ones(WIDTH)), closing_over(lambda: torch.full((WIDTH,), 3.0))),
    "shape": Case(Model, lambda: times(torch.ones(WIDTH)), closing_over(lambda: torch.full((3, 1), 3.0))),
    "function": Case(Model, lambda: applies(torch.sigmoid), closing_over(lambda: torch.tanh)),
    "module": Case(Model, lambda: applies(nn.Linear(WIDTH, WIDTH)), closing_over(nn.Tanh)),
    "method's number": Case(is_method, lambda: method_times(2.0), closing_over(lambda: 5.0)),
    "method's default": Case(is_method, lambda: lambda self, z, by=2.0: z * by, set_defaults(7.0)),
    "forward's number": Case(is_forward, lambda: forward_times(2.0), closing_over(lambda: 5.0)),
    "forward's default": Case(
        is_forward, lambda: lambda self, x, by=2.0: torch.relu(self.fc(x)) * by, set_defaults(7.0)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_notices(name: str) -> None:
    """By Dynamo's guards, or, before torch 2.13, by what is compared at each call."""
    case = CASES[name]
    function = case.function()
    model = case.model(function)
    fused, x = epigemm.fuse(model), torch.randn(3, WIDTH)
    for _ in range(2):
        torch.testing.assert_close(fused(x), model(x))
    before = model(x)
    case.change(function)
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("function", [listed, keyed, nested], ids=["list", "dict", "within a tuple"])
def test_defaults_that_change_in_place(function: Any) -> None:
    kept: Any = function.__defaults__[0]
    kept = kept[0] if function is nested else kept
    model = Model(function)
    fused, x = epigemm.fuse(model), torch.randn(3, WIDTH)
    torch.testing.assert_close(fused(x), model(x))
    key: Any = 0 if isinstance(kept, list) else "by"
    try:
        kept[key] = 7.0
        torch.testing.assert_close(fused(x), model(x))
    finally:
        kept[key] = 2.0


def test_defaults_of_a_class_of_which_the_forward_makes_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo does not guard these: it has the class's functions from no place that it could look at."""
    model = Model(lambda z: z * Box().by)
    fused, x = epigemm.fuse(model), torch.randn(3, WIDTH)
    torch.testing.assert_close(fused(x), model(x))
    monkeypatch.setattr(Box.__init__, "__defaults__", (7.0,))
    torch.testing.assert_close(fused(x), model(x))


# --- what compares them, also where Dynamo guards them ---------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_compared(name: str) -> None:
    case = CASES[name]
    function = case.function()
    model = case.model(function)
    seen = Inlined()
    seen.note(function)
    assert not seen.have_changed()
    case.change(function)
    assert seen.have_changed()
    del model


def test_what_has_changed_back_is_as_it_was() -> None:
    function = same_code(scaled)
    seen, defaults = Inlined(), function.__defaults__
    seen.note(function)
    function.__defaults__ = (7.0,)
    assert seen.have_changed()
    function.__defaults__ = defaults
    assert not seen.have_changed()


def test_closures_are_not_kept_alive() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    function = applies(layer)
    seen, gone = Inlined(), weakref.ref(layer)
    seen.note(function)
    del layer, function
    gc.collect()
    assert gone() is None and not seen.have_changed()


def test_a_function_that_calls_itself() -> None:
    def halved(times: int, z: Tensor) -> Tensor:
        return halved(times - 1, z / 2) if times else z

    seen = Inlined()
    seen.note(halved)
    assert not seen.have_changed()


def test_tensors_in_closures_can_be_swapped() -> None:
    kept = torch.ones(WIDTH)
    function = times(kept)
    seen = Inlined()
    seen.note(function)
    swap: Any = torch.utils.swap_tensors
    swap(kept, torch.zeros(WIDTH))
    assert not seen.have_changed()


def test_the_class_of_super_is_no_part_of_it() -> None:
    class Child(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    model = Child(torch.sigmoid)
    fused: Any = epigemm.fuse(model)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(fused(x), model(x))
    assert not fused.fusion_report.notes


def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlined, "ARE_GUARDED", False)
    function = times(2.0)
    fused, x = epigemm.fuse(Model(function)), torch.randn(3, WIDTH)
    fused(x)
    close_over(function, 5.0)
    with epigemm.fusion.watch() as unfused:
        fused(x)
    assert unfused == [("Model", inlined.CHANGED)]
