"""Autograd's node for plain tensors: the derivative of torch.library's, and a node that several threads may use."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import recorded, registration
from epigemm._native import ops
from tests.support.untyped import torch as untyped


def draw(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(*size, dtype=torch.float64, device=device, requires_grad=True)
        for size in ((3, 5), (4, 5), (4,), (4,))
    )


def gradients(arguments: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    result = epigemm.linear_scale(*arguments)
    return torch.autograd.grad(result.square().sum(), arguments, **options)


def test_plain_tensors_take_it_and_traced_ones_do_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[recorded.Operator] = []

    def record(operator: recorded.Operator, args: Any) -> Tensor:
        taken.append(operator)
        return recorded.record(operator, args)

    monkeypatch.setattr(registration, "record", record)
    arguments = draw(device)
    expected = torch.autograd.grad(
        (torch.nn.functional.linear(*arguments[:3]) * arguments[3]).square().sum(), arguments
    )
    for actual, wanted in zip(gradients(arguments), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert taken
    taken.clear()
    compiled = untyped.compile(epigemm.linear_scale, backend="aot_eager", fullgraph=True)
    actuals = torch.autograd.grad(compiled(*arguments).square().sum(), arguments)
    for actual, wanted in zip(actuals, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert not taken


def test_threads_may_run_backward_through_one_graph(device: torch.device) -> None:
    arguments = draw(device)
    result = epigemm.linear_scale(*arguments).sum()
    expected = torch.autograd.grad(result, arguments, retain_graph=True)
    wrong: list[str] = []

    def run() -> None:
        for _ in range(100):
            try:
                found = torch.autograd.grad(result, arguments, retain_graph=True)
                if not all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append("wrong")
            except Exception as error:  # in a thread nobody would see it
                wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("name", ["linear", "linear_relu"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (5,)], ids=str)
def test_results_are_no_views(name: str, learns: bool, shape: tuple[int, ...], device: torch.device) -> None:
    """They may be written in place, at the first call and at later ones, whatever was remembered."""
    x = torch.randn(*shape, device=device)
    weight = torch.randn(4, 5, device=device, requires_grad=learns)
    bias, other = torch.randn(4, device=device), torch.randn(4, device=device, requires_grad=True)
    for _ in range(3):
        result = getattr(epigemm, name)(x, weight, bias)
        assert not result._is_view()
        if name == "linear" or not learns:
            result += other
            result.sum().backward()
    with torch.no_grad():
        result = getattr(epigemm, name)(x, weight, bias)
    result += other
    assert result.requires_grad


@pytest.mark.parametrize("learns", [False, True])
def test_functional_tensors_outside_of_a_mode(learns: bool) -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    wrapped = [untyped._to_functional_tensor(t) for t in (x, weight.clone().requires_grad_(learns), bias)]
    untyped._enable_functionalization(reapply_views=True)
    try:
        result = ops.linear("relu_div", *wrapped, [], [2.0], "default")
        untyped._sync(result)
        plain = untyped._from_functional_tensor(result)
    finally:
        untyped._disable_functionalization()
    torch.testing.assert_close(plain.detach(), torch.relu(torch.nn.functional.linear(x, weight, bias)) / 2)
