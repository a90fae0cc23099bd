"""While a log is open calls are told to it, and made as if it were not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry
from epigemm.calls.log import Log, current
from epigemm.epilogues.library import BIAS_RELU

x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)


class Names(Log):
    """The functions that are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def begin(self, recorded: LinearCall | None = None) -> None:
        """As of `Log`."""

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """As of `Log`."""
        self.told.append(function.__name__)
        with self.closed():
            return function(*args)

    note = made

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Other(TorchFunctionMode):
    """A mode that a user has entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@epigemm.epilogue
def several(acc: Tensor) -> tuple[Tensor, Tensor]:
    return acc, acc.sum(0)


@pytest.mark.parametrize(
    ("function", "learns", "wanted"),
    [
        (lambda w: epigemm.linear_relu(x, w, bias), False, ["linear"]),
        (lambda w: epigemm.linear_relu(x, w, bias), True, ["linear_by_torch"]),
        (lambda w: epigemm.linear_relu(x, w, bias, precision="highest"), True, ["linear"]),
        (lambda w: epigemm.linear_gelu(x, w, bias), True, ["linear", "elementwise"]),
        (lambda w: epigemm.sigmoid(w), False, ["elementwise"]),
        (lambda w: epigemm.sigmoid(w), True, ["elementwise"]),
        (lambda w: epigemm.linear_scale(x, w, bias, bias), False, ["linear"]),
        (lambda w: epigemm.scale_batch_norm(w, x[0], x[1], x[2].abs()), False, ["fold_batch_norm", "elementwise"]),
        (lambda w: epigemm.linear_glu(x.bfloat16(), w.bfloat16()), False, ["one_kernel", "linear", "linear"]),
        (lambda w: several(x, w)[1], False, ["linear", "reduce"]),
    ],
)  # fmt: skip
def test_what_is_told(function: Callable[[Tensor], Tensor], learns: bool, wanted: list[str]) -> None:
    """Each call once, by the road that it takes when no log is open; and the result is the call's."""
    given = weight.clone().requires_grad_(learns)
    with Names() as log:
        found = function(given)
    assert log.told == wanted and torch.equal(found, function(given))
    assert found.requires_grad is learns


def test_who_else_has_a_say_has_it() -> None:
    with Names():
        assert entry.sees(x) is None and entry.sees(x.clone().requires_grad_()) is entry.RECORDED
        with Other():
            assert entry.sees(x) is entry.NOT_PLAIN
        call = LinearCall(BIAS_RELU, x, weight, (bias,))
        assert entry.call_linear(call) is entry.NOT_PLAIN
    assert isinstance(entry.call_linear(call), Tensor)


def test_modes_that_were_entered_later_stay() -> None:
    with Names() as log, Other():
        with log.closed():
            assert current.log is None and entry.sees(x) is entry.NOT_PLAIN
            assert torch._C._len_torch_function_stack() == 1
        assert current.log is log and torch._C._len_torch_function_stack() == 2
    assert current.log is None and entry.sees(x) is None


def test_logs_within_logs() -> None:
    with Names() as outer:
        with Names() as inner:
            epigemm.linear(x, weight)
        assert current.log is outer and len(inner.told) == 1 and not outer.told
        with outer.closed(), outer:
            epigemm.linear(x, weight)
        assert current.log is outer and outer.told == ["linear"]


def test_it_belongs_to_its_thread() -> None:
    found = []
    with Names() as log:
        thread = threading.Thread(target=lambda: found.append((current.log, epigemm.linear(x, weight))))
        thread.start()
        thread.join()
    assert found[0][0] is None and not log.told
