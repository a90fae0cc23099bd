"""The node of a linear layer with BatchNorm behind it: what it saves. Derivatives: tests/ops/test_statistics.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from epigemm.arguments.calls import LinearCall
from epigemm.autograd import batch_norm as nodes
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls.batch_norm import NOTHING_RUNS, Norm, Running
from epigemm.epilogues.library import BIAS
from tests.support import norm_calls
from tests.support.untyped import torch


@pytest.fixture(autouse=True)
def _passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    norm_calls.pretended(monkeypatch)


relus = pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])


def draw(device: Any = "cpu") -> list[Any]:
    """Leaves: x, weight, bias, scale, and BatchNorm's weight and bias."""
    sizes = ((9, 6), (5, 6), *[(5,)] * 4)
    drawn = [torch.randn(size, device=device, dtype=torch.float64).requires_grad_() for size in sizes]
    with torch.no_grad():
        drawn[3][2] = 0.0  # a scale of 0
    return drawn


def run(inputs: Any, *, relu: bool = False, running: Running = NOTHING_RUNS) -> Tensor:
    x, weight, bias, scale, bn_weight, bn_bias = inputs
    product = LinearCall(BIAS, x, weight, (bias,))
    return nodes.linear_batch_norm(
        BatchNormCall(product, Norm(scale, bn_weight, bn_bias, 0.1, relu), running)
    )


def plain(inputs: Any, *, relu: bool = False) -> Tensor:
    x, weight, bias, scale, bn_weight, bn_bias = inputs
    z = F.linear(x, weight, bias)
    z = z if scale is None else z * scale
    y = F.batch_norm(z, None, None, bn_weight, bn_bias, training=True, eps=0.1)
    return torch.relu(y) if relu else y


def test_the_bias_has_a_gradient_of_zero() -> None:
    """PyTorch's is what rounding leaves of a sum."""
    given = [each.detach().float().requires_grad_() for each in draw()]
    (found,) = torch.autograd.grad(run(given).square().sum(), given[2])
    assert torch.equal(found, torch.zeros(5))


def test_a_checkpoint_runs_the_forward_pass_twice() -> None:
    """So the running statistics follow twice, as with PyTorch's layers."""
    given = draw()
    running = Running(torch.zeros(5).double(), torch.ones(5).double(), torch.tensor(0), 0.5)
    result = checkpoint(lambda *values: run(values, running=running), *given, use_reentrant=False)
    found = torch.autograd.grad(result.square().sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(plain(given).square().sum(), given))
    assert running.tracked is not None and running.tracked.item() == 2


@relus
def test_a_frozen_product_is_not_kept(relu: bool) -> None:
    """Neither of its factors, which may be written before the backward pass. Second derivatives by the vectors hold."""
    given = draw()
    for each in given[:2]:
        each.requires_grad_(False)
    leaves = given[2:]

    def function(*values: Tensor) -> Tensor:
        return run([*given[:2], *values], relu=relu)

    assert torch.autograd.gradgradcheck(function, leaves)
    expected = torch.autograd.grad(plain(given, relu=relu).square().sum(), leaves)
    result = run(given, relu=relu)
    given[0].zero_(), given[1].zero_()
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), leaves), expected)
