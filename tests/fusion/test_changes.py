"""Changes between two calls that Dynamo does not notice by itself: the fused result stays that of the plain model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.fusion import changes, model_call
from epigemm.fusion.changes import Watched

WIDTH = 24


class Counts(nn.Module):
    """A layer with a number that it changes."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(WIDTH, WIDTH), 1.0
        self.drop, self.norm = nn.Dropout(rate), nn.BatchNorm1d(WIDTH, eps=1e-5 + rate)
        self.rate: Any = rate

    def forward(self, x: Tensor) -> Any:
        self.calls = self.calls + 1
        return torch.relu(self.drop(self.fc(x))) * self.calls


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.one, self.two = nn.Linear(WIDTH, WIDTH), Counts(), Counts()
        self.shift, self.several = nn.Parameter(torch.randn(WIDTH)), [Counts(), Counts()]
        self.register_buffer("mask", torch.rand(WIDTH))
        self.zero: Any = 0.0
        self.nested: Any = (0.0, [2.0, 0.0])
        self.frozen, self.phase = frozenset({0.0}), complex(0.0, 0.0)


def tells_apart(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (2.0 if self.one is self.two else 1.0)


def counts(self: Any, x: Tensor) -> Any:
    return self.two(self.one(x)) * self.one.calls


def counts_in_list(self: Any, x: Tensor) -> Any:
    return self.several[0](self.several[1](x)) * self.several[0].calls


def reads_members(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.shift + self.mask


def reads_zero(self: Any, x: Tensor) -> Any:
    return 1 / ((torch.relu(self.fc(x)) + 1) * self.zero)


def reads_nested(self: Any, x: Tensor) -> Any:
    return 1 / ((torch.relu(self.fc(x)) + self.nested[1][0]) * self.nested[0] * self.nested[1][1])


def reads_frozen(self: Any, x: Tensor) -> Any:
    return 1 / ((torch.relu(self.fc(x)) + 1) * next(iter(self.frozen)))


def reads_phase(self: Any, x: Tensor) -> Any:
    return 1 / ((torch.relu(self.fc(x)) + 1) * self.phase.imag)


def one_module(model: Any) -> None:
    model.two = model.one
    model.one.calls = 1.0


def one_of_list(model: Any) -> None:
    model.several[1] = model.several[0]
    model.several[0].calls = 1.0


def hides(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: model.__dict__.update({name: value})


CASES: list[tuple[Any, Any]] = [
    (tells_apart, one_module),
    (counts, one_module),
    (counts_in_list, one_of_list),
    (reads_members, hides("fc", nn.Tanh())),
    (reads_members, hides("shift", torch.full((WIDTH,), 3.0))),
    (reads_members, hides("mask", torch.full((WIDTH,), 3.0))),
    (reads_members, lambda m: m.fc.__dict__.update(weight=torch.eye(WIDTH))),
    (reads_members, lambda m: m.fc.__dict__.update(bias=torch.ones(WIDTH))),
    (reads_zero, lambda m: setattr(m, "zero", -0.0)),
    (reads_nested, lambda m: setattr(m, "nested", (-0.0, [2.0, 0.0]))),
    (reads_nested, lambda m: m.nested[1].__setitem__(1, -0.0)),
    (reads_nested, lambda m: m.nested[1].__setitem__(slice(None), [3.0, 1.0])),
    (reads_frozen, lambda m: setattr(m, "frozen", frozenset({-0.0}))),
    (reads_phase, lambda m: setattr(m, "phase", complex(0.0, -0.0))),
]


def same(fused: Any, plain: Any, *args: Any) -> None:
    torch.testing.assert_close(fused(*args), plain(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("forward", "change"), CASES)
def test_a_change_is_noticed(forward: Any, change: Any) -> None:
    plain = type("Model", (Base,), {"forward": forward})().eval()
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    x = torch.randn(9, WIDTH)
    same(fused, plain, x)
    assert fused.fusion_report.sites, fused.fusion_report
    change(plain), change(fused)
    same(fused, plain, x)


def test_the_sign_of_a_zero_that_is_given() -> None:
    kind = type("Model", (Base,), {"forward": lambda self, x, by: 1 / ((torch.relu(self.fc(x)) + 1) * by)})
    plain = kind()
    fused = epigemm.fuse(plain)
    for factor in (0.0, -0.0, 0.0):
        same(fused, plain, torch.randn(9, WIDTH), factor)


FORWARDS: list[Any] = [
    lambda self, x: torch.relu(self.drop(self.fc(x))) + 1,
    lambda self, x: torch.relu(self.norm(self.fc(x))) + 1,
    lambda self, x: torch.relu(self.fc(x)) * self.rate + 1,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=["dropout", "batch_norm", "factor"])
def test_models_of_one_class_with_other_numbers(forward: Any) -> None:
    kind = type("Model", (Counts,), {"forward": forward})
    for rate in (0.1, 0.2, 0.3):
        plain = kind(rate).eval()
        fused = epigemm.fuse(plain)
        same(fused, plain, torch.randn(9, WIDTH))
        assert not fused.fusion_report.sites[0].notes, fused.fusion_report


def test_a_rate_that_changes_from_call_to_call() -> None:
    plain = type("Model", (Counts,), {"forward": FORWARDS[0]})().eval()
    fused: Any = epigemm.fuse(plain)
    for rate in (0.1, 0.2, 0.3):
        fused.drop.p = rate
        same(fused, plain, torch.randn(9, WIDTH))
    assert [site.notes for site in fused.fusion_report.sites] == [()], fused.fusion_report


def swaps(model: Any) -> None:
    swap: Any = torch.utils.swap_tensors
    swap(model.fc.weight, nn.Parameter(torch.eye(WIDTH)))


def loads(model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [swaps, loads, nn.Module.double], ids=lambda each: each.__name__)
@pytest.mark.skipif(
    "invalidate_compile_context_weakrefs" not in model_call._SETTINGS,
    reason="torch 2.10: nor are they after torch.compile",
)
def test_tensors_that_are_swapped(change: Any) -> None:
    plain = type("Model", (Base,), {"forward": reads_members})()
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    x = torch.randn(9, WIDTH)
    same(fused, plain, x)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        change(plain), change(fused)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for rows in (9, 5):
        x = torch.randn(rows, WIDTH, dtype=plain.fc.weight.dtype)
        same(fused, plain, x)
        assert fused(x).dtype is plain(x).dtype


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython tells of no changes")
def test_nothing_is_compared_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after each change: of a function's code, of one of torch's, of a class of the model's or of its objects."""
    compared: list[str] = []
    compare = Watched._compared

    def counted(self: Watched) -> str:
        compared.append(compare(self))
        return compared[-1]

    monkeypatch.setattr(Watched, "_compared", counted)
    kind: Any = type("Model", (Base,), {"forward": lambda self, x: torch.relu(self.one.fc(x))})
    fused, x = epigemm.fuse(kind()), torch.randn(9, WIDTH)
    fused(x)

    def count() -> int:
        compared.clear()
        for _ in range(3):
            fused(x)
        return len(compared)

    count()
    assert count() == 0
    for place, name in ((torch, "relu"), (nn.Linear, "forward"), (kind, "forward"), (Counts, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, passing_on(getattr(place, name)))
            assert count() == 1 and compared[0]
        assert count() == 1 and not compared[0]
        assert count() == 0
    with monkeypatch.context() as patch:
        patch.setattr(kind.forward, "__code__", (lambda self, x: self.one.fc(x)).__code__)
        assert count() == 1 and compared[0]
    assert count() == 1 and not compared[0]
    assert count() == 0


def test_where_too_many_watch_each_call_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_watch", lambda *_: False)
    watched = Watched(kind := type("Model", (Base,), {})())
    assert [watched.why_not() for _ in range(2)] == ["", ""]
    monkeypatch.setattr(type(kind), "helper", 1, raising=False)
    assert watched.why_not()
    monkeypatch.undo()
    assert not watched.why_not()


def test_what_changes_while_it_is_compared_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted before it is compared; and an answer about less than is looked at now is none."""
    told, compared = [0], []

    def compare(self: Watched) -> str:
        compared.append(1)
        told[0] += len(compared) == 1
        return ""

    monkeypatch.setattr(changes, "_watch", lambda *_: True)
    monkeypatch.setattr(changes, "_changes", lambda: told[0])
    monkeypatch.setattr(Watched, "_compared", compare)
    watched = Watched(nn.Linear(1, 1))
    for count in (1, 2, 2):
        watched.why_not()
        assert len(compared) == count
    watched.note_class(Counts)
    watched.why_not()
    assert len(compared) == 3
