"""A Python function becomes an epilogue: what it declares, what is known of it, and what is refused by its line."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import (
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    SCALAR,
    Matrix,
    Operand,
    PerColumn,
    PerRow,
    Scalar,
)
from tests.net import errors
from tests.net.test_net import of_this_torch


def swish_clamp(acc: Tensor, bias: PerColumn, residual: Matrix, gain: PerRow, limit: Scalar = 6.0) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) * gain + residual


def test_declaration() -> None:
    traced = trace(swish_clamp)
    assert traced.name == "swish_clamp"
    assert traced.operands == (
        Operand(PER_COLUMN, "bias"),
        Operand(MATRIX, "residual"),
        Operand(PER_ROW, "gain"),
        Operand(SCALAR, "limit", 6.0),
    )
    assert traced.slots == (0, 10, 8, 4)
    assert traced.reads == (True, True, True, True)


def test_digest_is_of_what_is_computed() -> None:
    def other_name(acc: Tensor, b: PerColumn) -> Tensor:
        return torch.relu(acc + b)

    first = trace(lambda_with_bias())
    assert first.digest == trace(other_name).digest
    assert first.digest != trace(lambda acc: torch.relu(acc)).digest
    code = (
        "from epigemm.epilogues.declaration import trace\nimport sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from tests.epilogues.tracer.test_trace import lambda_with_bias\nprint(trace(lambda_with_bias()).digest)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == first.digest


def lambda_with_bias() -> Callable[..., Tensor]:
    def biased(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.relu(acc + bias)

    return biased


def test_unread_operands_are_seen() -> None:
    def unread(acc: Tensor, bias: PerColumn, other: PerColumn) -> Tensor:
        return acc + other + 0.0 * 2.0

    traced = trace(unread)
    assert traced.reads == (False, True)
    text = traced.kernel_source((1, 2))
    assert "if (slot == 0)" not in text and "if (slot == 1) return 2;" in text


NUMBERS: list[Callable[..., Any]] = [
    lambda acc: torch.where(acc > 0, 1.0, 0.1) * acc,
    lambda acc: torch.where(acc > 0, 1.0, torch.where(acc < -1, 0.3, 0.1)) * acc,
    lambda acc: torch.tanh(torch.where(acc > 0, 1.0, -0.7)) * acc,
    lambda acc: torch.full((), 0.1) * acc,
    lambda acc: torch.tensor(0.1) * acc,
    lambda acc: torch.scalar_tensor(0.1) * acc,
    lambda acc: torch.ones(()) * 0.1 * acc,
    lambda acc: (acc > 0) * 0.1 * acc,
    lambda acc: (acc > 0) / 3 + acc,
    lambda acc: torch.sigmoid(acc > 0) * acc,
    lambda acc: torch.full_like(acc, 0.1) * acc,
    lambda acc: (torch.where(acc > 0, 1.0, 0.1) + acc, torch.where(acc > 0, 0.7, 0.1).sum(0)),
]


@pytest.mark.parametrize("at_call", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("at_decoration", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_do_not_depend_on_the_default_dtype(
    at_decoration: torch.dtype, at_call: torch.dtype, rng: torch.Generator
) -> None:
    """They are those of PyTorch under its own default, fp32; in fp64 calls, too."""
    acc = torch.randn(4, 5, generator=rng)
    for function in NUMBERS:
        torch.set_default_dtype(at_decoration)
        made = epigemm.epilogue(function)
        assert torch.get_default_dtype() == at_decoration
        torch.set_default_dtype(at_call)
        given = [acc, acc.double()]
        found = [made.elementwise(each) for each in given]
        torch.set_default_dtype(torch.float32)
        for each, one in zip(given, found, strict=True):
            torch.testing.assert_close(one, function(each), rtol=1e-6, atol=1e-6)


def test_a_refusal_leaves_the_default_dtype_as_it_was() -> None:
    torch.set_default_dtype(torch.bfloat16)
    with pytest.raises(NotImplementedError):
        trace(lambda acc: acc.softmax(0))
    assert torch.get_default_dtype() == torch.bfloat16


@pytest.mark.parametrize("activation", [torch.tanh, torch.exp, F.gelu, F.silu])
def test_fp32_beside_fp64_is_rounded_to_fp32(activation: Any) -> None:
    """Two numbers chosen by a condition are fp32, as in PyTorch, and so is a function of them: here to its last bit."""

    def function(acc: Tensor) -> Tensor:
        return activation(torch.where(acc > 0, 0.3, -0.7)) * acc  # type: ignore[no-any-return]

    acc = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    found = epigemm.epilogue(function).elementwise(acc) / acc
    assert torch.equal(found, found.float().double())
    torch.testing.assert_close(found, function(acc) / acc, rtol=2.0**-20, atol=0)


def test_shapes_that_decide_nothing() -> None:
    for function in (
        lambda acc: acc * 2 if acc.dim() == 2 and acc.ndim == 2 and len(acc.shape) == 2 else acc * 3,
        lambda acc: acc.expand(acc.shape) * 2,
        lambda acc: acc * 2 if isinstance(acc, Tensor) and acc.is_floating_point() else acc * 3,
    ):
        made = epigemm.epilogue(function)
        for sizes in ((1, 1), (1, 3), (4, 1), (4, 3)):
            acc = torch.ones(sizes)
            assert torch.equal(made.elementwise(acc), acc * 2)


# --- refusals: an error that names the line; net/refused.txt has others -----------------------------------------------


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


def is_read_behind_a_result(acc: Tensor) -> Any:
    total = acc.sum(0)
    return (
        total,
        total * 2.0,
    )


# Results that are refused: the line of the return.


def a_number(acc: Tensor) -> Any:
    if acc is None:
        return acc.relu()
    z = acc + 1.0
    return 3.0 if z is acc else 4.0


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
        (derivative_of_nothing, NotImplementedError, GRADIENT, "return Reversed.apply"),
        (own_derivative, NotImplementedError, GRADIENT, "return x * 2.0"),
        (
            is_read_behind_a_result,
            NotImplementedError,
            "sum is a reduction, and its result is read",
            "total * 2.0,",
        ),
        (a_number, TypeError, "it returns float", "return 3.0 if z is acc"),
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
