"""Modules that replace others: equal ones share a graph, and those that differ in what it reads do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm

WIDTH = 8


class Counts(nn.Module):
    def __init__(self, rate: float = 2.0) -> None:
        super().__init__()
        self.fc, self.calls, self.rate = nn.Linear(WIDTH, WIDTH), 1, rate

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return torch.relu(self.fc(x)) * self.calls * self.rate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.block, self.other, self.two = nn.ReLU(), Block(), Block(), Counts()
        self.several, self.table = [Counts(), Counts()], {"a": Counts()}
        self.again = self.two

    def forward(self, x: Tensor) -> Any:
        for each in (self.two, self.block.inner, self.other.inner, *self.several, self.table["a"]):
            each.calls = 0
        x = self.act(self.two(self.block(self.other(x))))
        x = self.several[0](self.several[1](x)) + self.table["a"](x)
        same = [self.two is self.block.inner, self.again is self.two, self.several[0] is self.several[1]]
        return x * (1 + sum(2**place * each for place, each in enumerate(same)))


def compare(fused: Any, plain: Any, calls: int = 6) -> None:
    for _ in range(calls):
        x = torch.rand(3, WIDTH)
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)


def graphs(fused: Any) -> int:
    return int(fused._compiled_call_impl._graphs)


def pair(kind: Callable[[], nn.Module] = Model) -> tuple[Any, Any]:
    plain = kind()
    for parameter in plain.parameters():
        parameter.requires_grad_(False).abs_()
    return epigemm.fuse(copy.deepcopy(plain), inplace=True), plain


def inner_as_two(model: Any) -> None:
    model.two = model.block.inner


def two_as_inner(model: Any) -> None:
    model.block.inner = model.two


def other_as_block(model: Any) -> None:
    model.other = model.block


def swapped(model: Any) -> None:
    model.other, model.block = model.block, model.other


def no_longer_again(model: Any) -> None:
    model.again = copy.deepcopy(model.two)


def one_of_list(model: Any) -> None:
    model.several[1] = model.several[0]


def list_and_child(model: Any) -> None:
    model.several[0] = model.block.inner


def table_and_list(model: Any) -> None:
    model.table["a"] = model.several[1]


CHANGES = [
    *(inner_as_two, two_as_inner, other_as_block, swapped, no_longer_again, one_of_list, list_and_child),
    table_and_list,
]


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_become_one_or_several(change: Any) -> None:
    fused, plain = pair()
    compare(fused, plain)
    assert fused.fusion_report.sites and graphs(fused) == 1
    change(plain), change(fused)
    compare(fused, plain)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.act(self.fc(x)))


def another(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, copy.deepcopy(getattr(model, name)))


def with_weights(model: Any) -> None:
    model.fc = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(WIDTH) * 2), model.fc.bias.fill_(0.5)


@pytest.mark.parametrize("change", [another("act"), another("fc"), with_weights])
def test_equal_modules_have_one_graph(change: Any) -> None:
    fused, plain = pair(Small)
    for _ in range(5):
        compare(fused, plain, 1)
        change(plain), change(fused)
    compare(fused, plain, 1)
    assert graphs(fused) == 1 + (change is with_weights)  # whose weights record gradients


def hooked() -> nn.Module:
    act = nn.ReLU()
    act.register_forward_hook(lambda module, args, result: result * 2)
    return act


def patched() -> nn.Module:
    act = nn.ReLU()
    act.forward = lambda input: input * 3  # type: ignore[method-assign]
    return act


class Derived(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return input - 1


def hiding() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    vars(layer)["weight"] = torch.eye(WIDTH)
    return layer


OTHERS: list[tuple[str, Callable[[], Any]]] = [
    *(("act", kind) for kind in (hooked, patched, Derived, nn.Tanh, nn.Identity, nn.ReLU6)),
    ("act", lambda: nn.LeakyReLU(0.2)),
    *(("fc", kind) for kind in (hiding, lambda: nn.Linear(WIDTH, WIDTH, bias=False))),
    ("fc", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    ("fc", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    ("drop", lambda: nn.Dropout(1.0)),
]


@pytest.mark.parametrize(("name", "make"), OTHERS)
def test_other_modules_have_their_own(name: str, make: Any) -> None:
    fused, plain = pair(Small)
    compare(fused, plain, 3)
    module = make()
    for model in (plain, fused):
        setattr(model, name, module)
    compare(fused, plain, 2)


def test_numbers_of_new_modules() -> None:
    """A norm's eps, and a number that the graph reads."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.counts = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counts()

        def forward(self, x: Tensor) -> Any:
            return self.counts(torch.relu(self.norm(self.fc(x))))

    fused, plain = pair(Norms)
    fused.eval(), plain.eval()
    for number in (0.5, 1.0, 1.0, 2.0):
        norm, rate = nn.BatchNorm1d(WIDTH, eps=number).eval(), number
        for model in (plain, fused):
            model.norm, model.counts.rate = norm, rate
        compare(fused, plain, 1)
