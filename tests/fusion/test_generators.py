"""Generators and coroutines that a model returns run when they are asked for values, as the plain model's do."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm

WIDTH = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None


def steps(self: Any, x: Tensor) -> Any:
    while True:
        factor = yield x
        x = torch.relu(self.fc(x)) * (factor or 1.0)


def three(self: Any, x: Tensor) -> Iterator[Tensor]:
    for _ in range(3):
        x = torch.relu(self.fc(x))
        yield x


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def given(self: Any, x: Tensor) -> Any:
    return steps(self, x)


def delegated(self: Any, x: Tensor) -> Any:
    yield from steps(self, x)


def expression(self: Any, x: Tensor) -> Any:
    x = torch.relu(self.fc(x))
    return (torch.relu(self.fc(x)) * factor for factor in itertools.count(1))


def begun(self: Any, x: Tensor) -> Any:
    rest = steps(self, torch.relu(self.fc(x)))
    return next(rest) * 2, rest


def within_a_dict(self: Any, x: Tensor) -> Any:
    return {"now": torch.relu(self.fc(x)), "later": steps(self, x)}


def chained(self: Any, x: Tensor) -> Any:
    return itertools.chain([torch.relu(self.fc(x))], steps(self, x))


def mapped(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)), map(lambda factor: torch.relu(self.fc(x)) * factor, range(1, 4))  # noqa: C417


def stored(self: Any, x: Tensor) -> Any:
    self.kept = steps(self, x)
    return torch.relu(self.fc(x))


def childs(self: Any, x: Tensor) -> Any:
    return self.child(torch.relu(self.fc(x)))


async def awaited(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x))


async def awaited_steps(self: Any, x: Tensor) -> Any:
    while True:
        x = torch.relu(self.fc(x))
        yield x


def model_of(forward: Callable[..., Any], child: Callable[..., Any] = three) -> Any:
    model = type("Model", (Base,), {"forward": forward})()
    model.child = type("Child", (Base,), {"forward": child})()
    return model


def lazy_part(model: Any, result: Any) -> Any:
    if model.kept is not None:
        return model.kept
    if isinstance(result, dict):
        return result["later"]
    return result[1] if isinstance(result, tuple) else result


def first(lazy: Any) -> Any:
    if inspect.isasyncgen(lazy) or inspect.iscoroutine(lazy):
        step: Any = lazy if inspect.iscoroutine(lazy) else lazy.__anext__()
        with pytest.raises(StopIteration) as stop:
            step.send(None)
        return stop.value.value
    return next(lazy)


def run(model: Any, x: Tensor) -> tuple[type, list[Tensor]]:
    """What the lazy part gives, where the weights change after the call and between its steps."""
    lazy = lazy_part(model, model(x))
    found = []
    for _ in range(1 if inspect.iscoroutine(lazy) else 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        found.append(first(lazy))
    generator: Any = lazy
    if inspect.isgenerator(lazy) and generator.gi_code is steps.__code__:
        found.append(generator.send(3.0))
    return type(lazy), found


RIGHT_BY_DYNAMO = [within_a_dict, mapped, functools.partialmethod(steps)]
LAZY = [
    *(steps, three, given, delegated, expression, begun, chained, stored, childs, *RIGHT_BY_DYNAMO),
    *(wrapped(steps), awaited, wrapped(awaited), awaited_steps),
]


@pytest.mark.parametrize("forward", LAZY, ids=lambda each: getattr(each, "__name__", "partial"))
def test_what_is_lazy_stays_lazy(forward: Any) -> None:
    plain, x = model_of(forward), torch.ones(2, WIDTH)
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    for _ in range(2):
        (kind, found), (expected_kind, expected) = run(fused, x), run(plain, x)
        assert kind is expected_kind
        torch.testing.assert_close(found, expected)
    if forward not in RIGHT_BY_DYNAMO:
        assert "left alone: " in str(fused.fusion_report), fused.fusion_report


def loops(self: Any, x: Tensor) -> Any:
    for part in self.child(x):
        x = x + part
    return torch.relu(self.fc(x))


def sums(self: Any, x: Tensor) -> Any:
    return sum(torch.relu(layer(x)) for layer in (self.fc, self.child.fc))


def first_of_many(self: Any, x: Tensor) -> Any:
    return next(steps(self, torch.relu(self.fc(x))))


@pytest.mark.parametrize("forward", [loops, sums, first_of_many])
def test_what_is_used_up_inside_is_fused(forward: Any) -> None:
    plain = model_of(forward)
    fused = epigemm.fuse(plain)
    for rows in (2, 5):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(fused(x), plain(x))
    assert fused.fusion_report.sites and "left alone" not in str(fused.fusion_report)


def test_a_coroutine_that_is_run_inside() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = torch.relu(self.fc(x))
        try:
            self.child(x).send(None)
        except StopIteration as stop:
            return torch.relu(self.fc(stop.value))

    plain = model_of(forward, awaited)
    fused, x = epigemm.fuse(plain), torch.ones(2, WIDTH)
    for _ in range(2):
        torch.testing.assert_close(fused(x), plain(x))


def test_dynamo_is_as_it_was_for_others() -> None:
    """What one model is left alone for is nothing to another, nor to a function that torch.compile compiles."""
    x = torch.ones(2, WIDTH)
    for forward in (given, awaited):
        first(epigemm.fuse(model_of(forward))(x))
    compiled = torch.compile(lambda x: (x * factor for factor in range(3)), backend="eager")
    torch.testing.assert_close(list(compiled(x)), [x * factor for factor in range(3)])
    fused = epigemm.fuse(model_of(sums))
    fused(x)
    assert len(fused.fusion_report.sites) == 2
