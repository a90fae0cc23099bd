"""Where and how epilogues are made and kept: threads, default devices, copies and pickles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigemm
from epigemm import PerColumn, Scalar, UserEpilogue


def plain(acc: Tensor, bias: PerColumn, scale: Scalar = 0.5) -> Tensor:
    return torch.tanh(acc + bias) * torch.tensor(0.5) * scale


@epigemm.epilogue
def decorated(acc: Tensor, bias: PerColumn) -> Tensor:
    return acc - bias


def test_threads_make_epilogues_at_once() -> None:
    z, made, errors = torch.randn(3, 4), dict[int, UserEpilogue](), list[Exception]()

    def make(number: int) -> None:
        try:
            made[number] = epigemm.epilogue(lambda acc: torch.tanh(acc) * float(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number in range(8):
        torch.testing.assert_close(made[number].elementwise(z), torch.tanh(z) * number)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_makes_no_difference(device: str) -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    expected = plain(x @ weight.t(), bias)
    with torch.device(device):
        made = epigemm.epilogue(plain)
        found = made(x, weight, bias)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(made(x, weight, bias), expected)


@pytest.mark.parametrize(
    "surroundings", [FakeTensorMode, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")]
)
def test_what_surrounds_a_decoration_makes_no_difference(surroundings: Callable[[], Any]) -> None:
    z, bias = torch.randn(3, 5), torch.randn(5, requires_grad=True)
    with surroundings():
        made = epigemm.epilogue(plain)
    found = made.elementwise(z, bias)
    torch.testing.assert_close(found, plain(z, bias))
    assert found.requires_grad


def test_threads_make_epilogues_and_fuse_at_first() -> None:
    """Each imports a part of torch that may not be imported twice at once: in a process that has none of it yet."""
    program = """
import threading, torch, epigemm
def make(): epigemm.epilogue(lambda acc: torch.tanh(acc) * 2.0)
def fuse(): epigemm.fuse(torch.nn.Linear(2, 2))
errors = []
threading.excepthook = errors.append
threads = [threading.Thread(target=each) for each in (make, fuse) * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize("function", [decorated, epigemm.epilogue(plain)])
def test_layers_are_pickled_and_copied(function: UserEpilogue) -> None:
    layer = epigemm.nn.Linear(4, 5, epilogue=function)
    x = torch.randn(3, 4)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        torch.testing.assert_close(other(x), layer(x))
    assert copy.deepcopy(layer).epilogue is function
    is_by_name = pickle.loads(pickle.dumps(function)) is function
    assert is_by_name == (function is decorated)


def test_a_function_without_a_name_has_no_pickle() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(epigemm.epilogue(lambda acc: acc * 2.0))
