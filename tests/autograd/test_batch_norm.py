"""The node of a linear layer with BatchNorm behind it: what it saves. Derivatives: tests/ops/test_statistics.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from epigemm.arguments.calls import LinearCall
from epigemm.autograd import batch_norm as nodes
from epigemm.autograd.batch_norm import BatchNormCall, Vectors
from epigemm.calls.batch_norm import NOTHING_RUNS, Running
from epigemm.epilogues.library import BIAS
from tests.support import norm_calls
from tests.support.untyped import backward, torch


@pytest.fixture(autouse=True)
def _passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    norm_calls.pretended(monkeypatch)


NAMES = ("x", "weight", "bias", "scale", "bn_weight", "bn_bias")
relus = pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])


def draw(device: Any = "cpu", absent: tuple[str, ...] = ()) -> list[Any]:
    """Leaves, in the node's order."""
    sizes = ((9, 6), (5, 6), *[(5,)] * 4)
    drawn = [torch.randn(size, device=device, dtype=torch.float64).requires_grad_() for size in sizes]
    if "bn_bias" not in absent:  # else it puts a column at the kink of a ReLU
        with torch.no_grad():
            drawn[3][2] = 0.0  # a scale of 0
    return [None if name in absent else each for name, each in zip(NAMES, drawn, strict=True)]


def run(inputs: Any, *, relu: bool = False, running: Running = NOTHING_RUNS) -> Tensor:
    x, weight, bias, *vectors = inputs
    product = LinearCall(BIAS, x, weight, (bias,))
    return nodes.linear_batch_norm(BatchNormCall(product, Vectors(*vectors), running, 0.1, relu))


def plain(inputs: Any, *, relu: bool = False) -> Tensor:
    x, weight, bias, scale, bn_weight, bn_bias = inputs
    z = F.linear(x, weight, bias)
    z = z if scale is None else z * scale
    y = F.batch_norm(z, None, None, bn_weight, bn_bias, training=True, eps=0.1)
    return torch.relu(y) if relu else y


ABSENT = [("bias",), ("scale",), ("bn_weight", "bn_bias"), ("bias", "scale", "bn_weight", "bn_bias")]


@relus
@pytest.mark.parametrize("absent", ABSENT, ids="-".join)
def test_derivatives_without_some_of_the_vectors(absent: tuple[str, ...], relu: bool, device: Any) -> None:
    given = draw(device, absent)
    leaves = [each for each in given if each is not None]
    upstream = torch.randn(9, 5, device=device, dtype=torch.float64)
    expected = torch.autograd.grad(plain(given, relu=relu), leaves, upstream)
    for create_graph in (False, True):
        found = torch.autograd.grad(run(given, relu=relu), leaves, upstream, create_graph=create_graph)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_bias_has_a_gradient_of_zero() -> None:
    """PyTorch's is what rounding leaves of a sum."""
    given = [each.detach().float().requires_grad_() for each in draw()]
    (found,) = torch.autograd.grad(run(given).square().sum(), given[2])
    assert torch.equal(found, torch.zeros(5))


def test_batched_gradients(device: Any) -> None:
    given = draw(device)
    result = run(given, relu=True)
    upstream = torch.randn(3, *result.shape, device=device, dtype=torch.float64)
    batched = torch.autograd.grad(result, given, upstream, retain_graph=True, is_grads_batched=True)
    for place in range(3):
        one = torch.autograd.grad(result, given, upstream[place], retain_graph=True)
        torch.testing.assert_close([each[place] for each in batched], list(one))


@pytest.mark.parametrize("name", NAMES)
def test_an_input_that_is_written(name: str) -> None:
    """Too early is an error. A bias may be, of BatchNorm alone: its ReLU reads it again, to tell where it has cut."""
    given = draw()
    result, expected = run(given), plain(given)
    with torch.no_grad():
        given[NAMES.index(name)].mul_(2.0)
    if name in ("bias", "bn_bias"):
        found = torch.autograd.grad(result.square().sum(), given[0])
        torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given[0]))
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(result.sum())


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
