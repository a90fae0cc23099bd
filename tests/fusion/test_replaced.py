"""Functions of torch, and methods of a model's classes and objects, that were replaced by others."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import fusion

WIDTH = 8


class Helper:
    def apply(self, z: Tensor) -> Tensor:
        return torch.relu(z) * 2

    @classmethod
    def made(cls, z: Tensor) -> Tensor:
        return torch.relu(z) * 2


class Derived(Helper):
    pass


class Base(nn.Module):
    library = torch

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.helper, self.derived = Helper(), Derived()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.fc(x))


def by_module(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x))


def by_functional(self: Any, x: Tensor) -> Any:
    return F.relu(self.fc(x))


def by_local_import(self: Any, x: Tensor) -> Any:
    import torch as library

    return library.relu(self.fc(x))


def by_attribute(self: Any, x: Tensor) -> Any:
    return self.library.relu(self.fc(x))


def by_getattr(self: Any, x: Tensor) -> Any:
    return getattr(torch, "re" + "lu")(self.fc(x))


bound = torch.relu


def by_another_name(self: Any, x: Tensor) -> Any:
    """Which it keeps when another has the place of it."""
    return bound(self.fc(x))


def by_method(self: Any, x: Tensor) -> Any:
    return self.fc(x).relu()


def by_inner(self: Any, x: Tensor) -> Any:
    """`F.softsign` calls `Tensor.abs`."""
    return F.softsign(self.fc(x))


def by_operator(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2


def by_helper(self: Any, x: Tensor) -> Any:
    return self.helper.apply(self.fc(x))


def by_class(self: Any, x: Tensor) -> Any:
    return self.helper.made(self.fc(x))


def by_derived(self: Any, x: Tensor) -> Any:
    return self.derived.apply(self.fc(x))


def by_selection(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)).select(0, 0)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return torch.mul(function(*args, **kwargs), 2)

    return wrapper


def of_c(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.sigmoid


def impure(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(lambda z, *_, **__: torch.tanh(z) * FACTOR[0])


FACTOR = [2.0]
RELU = [by_module, by_local_import, by_attribute, by_getattr, by_another_name, by_functional, Base.forward]
PATCHES: list[tuple[Any, Any, str]] = [
    *((forward, torch, "relu") for forward in RELU),
    *((by_functional, F, "relu"), (Base.forward, F, "relu"), (by_method, Tensor, "relu")),
    *((by_inner, Tensor, "abs"), (by_operator, Tensor, "__mul__"), (by_module, F, "linear")),
    *((by_module, nn.Module, "__call__"), (by_module, nn.Module, "_call_impl")),
    *(
        (by_helper, Helper, "apply"),
        (by_class, Helper, "made"),
        (by_derived, Derived, "apply"),
        (by_derived, Helper, "apply"),
    ),
]


def model_of(forward: Callable[..., Any]) -> Any:
    return type("Model", (Base,), {"forward": forward})().eval()


def reasons(fused: Any, plain: Any) -> list[str]:
    with fusion.watch() as unfused, torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, WIDTH)
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)
    return [reason for _, reason in unfused]


@pytest.mark.parametrize(("forward", "place", "name"), PATCHES)
def test_before_and_after_the_first_call(
    forward: Any, place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_of(forward)
    before, after = epigemm.fuse(plain), epigemm.fuse(plain)
    assert reasons(after, plain) == [] and after.fusion_report.sites
    was = getattr(place, name)
    monkeypatch.setattr(place, name, staticmethod(doubled(was)) if inspect.ismethod(was) else doubled(was))
    assert any(f"{name} was replaced" in each for each in reasons(after, plain))
    reasons(before, plain)
    if place not in (Helper, Derived):  # which are traced as they are
        assert f"left alone: {place.__name__}.{name} was replaced" in str(before.fusion_report)
    monkeypatch.undo()
    assert reasons(after, plain) == []
    reasons(before, plain)


@pytest.mark.parametrize("patch", [of_c, impure])
@pytest.mark.parametrize("forward", [by_module, by_functional, by_getattr])
def test_what_is_no_function_in_python(forward: Any, patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_of(forward)
    fused = epigemm.fuse(plain)
    monkeypatch.setattr(torch, "relu", patch(torch.relu))
    for factor in (2.0, 3.0):
        FACTOR[0] = factor
        reasons(fused, plain)


def test_what_a_model_does_not_call_is_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages wrap functions of torch's when they are imported."""
    plain = model_of(by_selection)
    before, after = epigemm.fuse(plain), epigemm.fuse(plain)
    assert reasons(after, plain) == []
    for name in ("select", "index_select", "cos"):  # the method `select` is not the function
        monkeypatch.setattr(torch, name, doubled(getattr(torch, name)))
    assert reasons(after, plain) == reasons(before, plain) == []
    assert before.fusion_report.sites and "left alone" not in str(before.fusion_report)


CODES: list[tuple[Any, Any]] = [
    (Base.forward, nn.ReLU.forward),
    (by_helper, Helper.apply),
    (by_derived, Helper.apply),
    (by_class, vars(Helper)["made"].__func__),
    (by_functional, F.relu),
]


def by_five(self: Any, z: Tensor) -> Any:
    return z * 5


def by_five_in_place(input: Tensor, inplace: bool = False) -> Any:
    return input * 5


@pytest.mark.parametrize(("forward", "function"), CODES)
def test_other_code(forward: Any, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_of(forward)
    fused = epigemm.fuse(plain)
    assert reasons(fused, plain) == []
    other = by_five_in_place if function is F.relu else by_five
    monkeypatch.setattr(function, "__code__", other.__code__)
    assert reasons(fused, plain)
    monkeypatch.undo()
    assert reasons(fused, plain) == []


def test_the_root_s_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is replaced between `fuse` and the first call."""
    plain = model_of(by_module)
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    monkeypatch.setattr(nn.Module, "_call_impl", doubled(nn.Module._call_impl))
    reasons(fused, plain)
    assert "Module._call_impl was replaced" in str(fused.fusion_report)
