"""What no epilogue may do: an error at decoration that names the line. tests/net/refused.txt has those of one line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import PerColumn, PerRow
from tests.net import errors
from tests.net.test_net import of_this_torch


def swallows(acc: Tensor) -> Tensor:
    try:
        return acc * acc.item()
    except Exception:
        return acc


def swallows_all(acc: Tensor) -> Tensor:
    try:
        return acc if acc.sum() > 0 else -acc
    except:  # noqa: E722
        return acc * 2.0


@torch.no_grad()
def without_gradient(acc: Tensor) -> Tensor:
    return acc * 2.0


class Reversed(torch.autograd.Function):
    """Its forward runs nothing that a trace could see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Doubled(Reversed):
    """This one's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0


def derivative_of_nothing(acc: Tensor) -> Any:
    return Reversed.apply(acc * 2.0)  # type: ignore[no-untyped-call]


def own_derivative(acc: Tensor) -> Any:
    return Doubled.apply(acc)  # type: ignore[no-untyped-call]


LEAKY = torch.nn.LeakyReLU(0.1)


class Hidden:
    weight = torch.ones(())


def global_module(acc: Tensor) -> Any:
    return LEAKY(acc)


def attribute_tensor(acc: Tensor) -> Tensor:
    return acc * Hidden.weight


def another_without(acc: Tensor, bias: PerColumn | None = None) -> Any:
    return acc - acc.sum(0) if bias is None else acc + bias


def is_read_behind_a_result(acc: Tensor) -> Any:
    total = acc.sum(0)
    return (
        total,
        total * 2.0,
    )


# Results that are refused: the line of the return.


def named(acc: Tensor) -> Any:
    z = torch.tanh(acc)
    z = z * 2
    return {"z": z}


def a_number(acc: Tensor) -> Any:
    if acc is None:
        return acc.relu()
    z = acc + 1.0
    return 3.0 if z is acc else 4.0


def nothing(acc: Tensor) -> None:
    acc.relu()


def a_column(acc: Tensor, r: PerRow) -> Tensor:
    unused = acc * 2.0
    result = r * 2.0
    del unused
    return result


def a_condition(acc: Tensor) -> Tensor:
    return (  # of several lines
        acc > 0
    )


def the_first_of_two(acc: Tensor) -> Any:
    z = acc.relu()
    if SEVERAL:
        return {"z": z}
    return z


SEVERAL = True


GRADIENT = "no_grad or the like, or a torch.autograd.Function, is not supported"


@pytest.mark.parametrize(
    ("function", "error", "text", "line"),
    [
        (swallows, NotImplementedError, "item reads a tensor's value", "return acc * acc.item()"),
        (swallows_all, NotImplementedError, "use torch.where", "return acc if acc.sum()"),
        (without_gradient, NotImplementedError, GRADIENT, "return acc * 2.0"),
        (derivative_of_nothing, NotImplementedError, GRADIENT, "return Reversed.apply"),
        (own_derivative, NotImplementedError, GRADIENT, "return x * 2.0"),
        (global_module, TypeError, "'LEAKY' is captured, and a LeakyReLU may change unseen", "return LEAKY"),
        (attribute_tensor, NotImplementedError, "mul takes a captured tensor", "return acc * Hidden"),
        (
            is_read_behind_a_result,
            NotImplementedError,
            "sum is a reduction, and its result is read",
            "total * 2.0,",
        ),
        (named, TypeError, "it returns dict", 'return {"z": z}'),
        (a_number, TypeError, "it returns float", "return 3.0 if z is acc"),
        (nothing, TypeError, "it returns NoneType", "acc.relu()"),
        (a_column, NotImplementedError, r"its result has the shape \[M, 1\]", "return result"),
        (a_condition, NotImplementedError, "its result is of torch.bool", "return ("),
        (the_first_of_two, TypeError, "it returns dict", 'return {"z": z}'),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refusals(function: Callable[..., Any], error: type[Exception], text: str, line: str) -> None:
    with pytest.raises(error, match=text) as caught:
        trace(function)
    named = re.match(rf"{function.__name__} \({re.escape(__file__)}:(\d+)\): ", str(caught.value))
    assert named is not None and line in linecache.getline(__file__, int(named[1]))


@pytest.mark.skipif(not of_this_torch.args[0], reason="tests/net compares the messages")
def test_lines_of_the_net_with_another_torch() -> None:
    """Each is refused, and its line is named, whatever the words are."""
    named = re.compile(r"(NotImplementedError|TypeError|ValueError): refused \(<epilogue>:[12]\): ")
    assert [line for line, message in errors._of_decorations() if not named.match(message)] == []
