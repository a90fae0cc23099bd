"""What takes a call: the kernels, autograd with them, or the operator, for tracers, modes and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.autograd import nodes
from epigemm.calls import entry, resolve
from tests.support.untyped import backward
from tests.support.watching import BUILT_IN

pytestmark = BUILT_IN

x, weight, bias = torch.randn(6, 16), torch.randn(8, 16), torch.randn(8)


def expected(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))


def test_a_plain_call_is_answered_at_once() -> None:
    with (
        mock.patch.object(resolve, "linear", side_effect=AssertionError),
        mock.patch.object(nodes, "record", side_effect=AssertionError),
        mock.patch.object(entry, "sees", side_effect=AssertionError),
    ):
        torch.testing.assert_close(epigemm.linear_silu(x, weight, bias), expected(x))


def test_a_recorded_call_is_a_node() -> None:
    given = x.clone().requires_grad_()
    with mock.patch.object(nodes, "record", wraps=nodes.record) as node:
        backward(epigemm.linear_silu(given, weight, bias).sum())
    assert node.call_count == 1 and given.grad is not None


def test_a_call_that_cannot_be_answered_is_mended() -> None:
    memory = torch.randn(6, 24)
    x, out = memory[:, :16], memory[:, 16:]  # side by side, without a common byte
    with mock.patch.object(resolve, "linear", wraps=resolve.linear) as mended:
        assert epigemm.linear_silu(x, weight, bias, out=out) is out
    assert mended.call_count == 1
    torch.testing.assert_close(out, expected(x))


class Watches(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("who", ["a function mode", "vmap"])
def test_others_take_the_operators(who: str) -> None:
    call: Callable[[Tensor], Tensor] = lambda x: epigemm.linear_silu(x, weight, bias)  # noqa: E731
    if who == "vmap":
        found = torch.vmap(call)(x[None])[0]
    else:
        with Watches():
            found = call(x)
    torch.testing.assert_close(found, expected(x))


def test_a_number_of_another_kind_does_not_change_who_takes_a_call() -> None:
    with mock.patch.object(resolve, "linear", wraps=resolve.linear) as mended:
        found = epigemm.linear_relu_div(x, weight, bias, 2)
    assert mended.call_count == 1, "an integer is made a float, and the call is plain"
    torch.testing.assert_close(found, torch.relu(torch.nn.functional.linear(x, weight, bias)) / 2)


def test_a_profiler_is_told() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = epigemm.linear_silu(x, weight, bias)
        epigemm.sigmoid(x)
    assert {"epigemm::bias_silu", "epigemm::sigmoid"} <= {event.key for event in profile.key_averages()}
    torch.testing.assert_close(found, expected(x))


def test_autocast_casts_before_the_call_is_made() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = epigemm.linear_silu(x, weight, bias)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected(x), rtol=3e-2, atol=3e-2)
