"""The trace of a function leaves all other threads alone; what it decomposes has PyTorch's values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm.epilogues.tracer.graphs import decompositions
from tests.support.other_threads import TIMEOUT
from tests.support.threads import at_once

X, WEIGHT = torch.randn(6, 8), torch.randn(4, 8)


def pause() -> None:
    """For a function that is traced, which may capture no object that can change: the thread has what to do."""
    threading.current_thread().inside()  # type: ignore[attr-defined]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_many_threads_decorate_at_once(default: torch.dtype) -> None:
    """All are in the middle of their traces at the same time, and each gets its own function, of fp32 numbers."""
    count = 4
    barrier = threading.Barrier(count)
    found: dict[int, Any] = {}

    def decorate(number: int) -> None:
        def body(acc: Tensor) -> Tensor:
            first = torch.tanh(acc)
            pause()
            return first * torch.where(acc > 0, number + 0.1, 0.7) + torch.sigmoid(acc)

        vars(threading.current_thread())["inside"] = lambda: barrier.wait(TIMEOUT)
        found[number] = epigemm.epilogue(body)

    torch.set_default_dtype(default)
    at_once(count, decorate)
    assert torch.get_default_dtype() is default
    torch.set_default_dtype(torch.float32)
    z = X @ WEIGHT.t()
    for number in range(count):
        expected = torch.tanh(z) * torch.where(z > 0, number + 0.1, 0.7) + torch.sigmoid(z)
        torch.testing.assert_close(found[number](X, WEIGHT), expected)


# --- operators in terms of others: PyTorch's own values ---------------------------------------------------------------


aten: Any = torch.ops.aten


ENDS = torch.tensor(
    [0.0, 0.25, 0.5, 1.0, 2.0, 1e30, torch.inf, torch.nan, -0.25, -1.0, -2.0, -1e30, -torch.inf]
)
OF_NUMBERS: dict[str, tuple[Any, Callable[..., Tensor], tuple[Any, ...]]] = {
    "logit": (aten.logit.default, torch.logit, ()),
    "xlog1py": (aten.special_xlog1py.default, torch.special.xlog1py, ()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_values_and_derivatives_are_torchs_at_the_ends_of_domains(name: str, dtype: torch.dtype) -> None:
    overload, function, more = OF_NUMBERS[name]
    places = [ENDS] if name == "logit" else [*torch.cartesian_prod(ENDS, ENDS).unbind(1)]
    given = [place.to(dtype).requires_grad_() for place in places]
    for one, other in zip(
        _with_derivatives(decompositions()[overload], given, more),
        _with_derivatives(function, given, more),
        strict=True,
    ):
        torch.testing.assert_close(one, other, equal_nan=True)


def _with_derivatives(
    function: Callable[..., Tensor], given: list[Tensor], more: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    result = function(*given, *more)
    return result, *torch.autograd.grad(result, given, torch.ones_like(result))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("number", [0.0, -1.0, 0.3])
def test_xlog1py_of_a_number(place: int, number: float) -> None:
    def call(z: Tensor) -> Tensor:
        return torch.special.xlog1py(*((z, number) if place else (number, z)))  # type: ignore[no-any-return]

    made, z = epigemm.epilogue(lambda acc: call(acc)), ENDS[None].clone().requires_grad_()
    for one, other in zip(
        _with_derivatives(made.elementwise, [z], ()), _with_derivatives(call, [z], ()), strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_what_is_filled_with_a_plain_number_is_left_alone() -> None:
    like = torch.zeros(2, 3)
    found = decompositions()[aten.full_like.default](like, 0.5)
    assert found is NotImplemented or torch.equal(found, torch.full_like(like, 0.5))


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.huber_loss])
def test_losses_have_torchs_derivative_at_an_infinite_difference(loss: Any) -> None:
    @epigemm.epilogue
    def function(acc: Tensor, target: epigemm.Matrix) -> Tensor:
        return loss(acc, target, reduction="none")  # type: ignore[no-any-return]

    z = torch.tensor([[float("inf"), 1.0, -float("inf"), 0.2]], requires_grad=True)
    target = torch.zeros(1, 4)
    found, expected = function.elementwise(z, target), loss(z, target, reduction="none")
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(each.sum(), z)[0] for each in (found, expected)))
