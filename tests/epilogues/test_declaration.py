"""How many operands a function may have, its name, and where it is decorated. Refusals: tests/net/refused.txt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigemm
from epigemm import PerColumn, Scalar
from epigemm.epilogues.declaration import trace
from tests.support.formulas import formula


@pytest.mark.parametrize(("kind", "most"), [("PerColumn", 4), ("Scalar", 4), ("PerRow", 2), ("Matrix", 2)])
def test_limits(kind: str, most: int) -> None:
    names = [f"a{number}" for number in range(most)]
    parameters = ", ".join(f"{name}: {kind}" for name in names)
    assert len(trace(formula(f"acc, {parameters} -> acc + {' + '.join(names)}")).operands) == most


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "epilogue"), ("a\nb", "epilogue"), ("<lambda>", "epilogue"), ("a" * 5000, "a" * 64)],
)
def test_a_name_that_is_no_identifier_goes_nowhere(name: str, shown: str) -> None:
    function = formula("acc, bias: PerColumn -> acc + bias")
    function.__name__ = name
    assert trace(function).name == shown


# --- where and how epilogues are made: threads, default devices -------------------------------------------------------


def plain(acc: Tensor, bias: PerColumn, scale: Scalar = 0.5) -> Tensor:
    return torch.tanh(acc + bias) * torch.tensor(0.5) * scale


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
