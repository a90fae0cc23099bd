"""The node of a linear layer with BatchNorm behind it: first and second derivatives, and what it saves."""

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


def draw(device: Any = "cpu", dtype: Any = torch.float64, absent: tuple[str, ...] = ()) -> list[Any]:
    """Leaves, in the node's order."""
    sizes = ((9, 6), (5, 6), *[(5,)] * 4)
    drawn = [torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes]
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


ABSENT = [(), ("bias",), ("scale",), ("bn_weight", "bn_bias"), ("bias", "scale", "bn_weight", "bn_bias")]
absents = pytest.mark.parametrize("absent", ABSENT, ids=lambda names: "-".join(names) or "none")


@relus
@absents
def test_first_and_second_derivatives(absent: tuple[str, ...], relu: bool) -> None:
    given = draw(absent=absent)
    leaves = [each for each in given if each is not None]

    def function(*values: Tensor) -> Tensor:
        rest = iter(values)
        return run([None if each is None else next(rest) for each in given], relu=relu)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@relus
@absents
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_torch_computes(absent: tuple[str, ...], relu: bool, dtype: Any, device: Any) -> None:
    """Results and gradients: of PyTorch's operators, in 16 bits of float64. Both kinds of backward passes."""
    given = draw(device, dtype, absent)
    leaves = [each for each in given if each is not None]
    result = run(given, relu=relu)
    upstream = torch.randn(result.shape, device=device).to(dtype) * (result != 0)
    upstream[result.abs() < 0.1] = 0.0  # where a ReLU of rounded values may cut or not
    wide = [None if each is None else each.detach().double().requires_grad_() for each in given]
    expected = plain(wide, relu=relu)
    of_wide = [each for each in wide if each is not None]
    want = torch.autograd.grad(expected, of_wide, upstream.double())
    rtol, atol = (5e-2, 1e-1) if dtype is torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=atol)
    for create_graph in (False, True):
        found = torch.autograd.grad(result, leaves, upstream, retain_graph=True, create_graph=create_graph)
        for mine, other, leaf in zip(found, want, leaves, strict=True):
            assert mine.dtype is leaf.dtype
            torch.testing.assert_close(mine.double(), other, rtol=rtol, atol=atol)


def test_the_bias_has_a_gradient_of_zero() -> None:
    """PyTorch's is what rounding leaves of a sum."""
    given = draw(dtype=torch.float32)
    (found,) = torch.autograd.grad(run(given).square().sum(), given[2])
    assert torch.equal(found, torch.zeros(5))


@pytest.mark.parametrize("needed", NAMES)
def test_only_what_needs_a_gradient_gets_one(needed: str, device: Any) -> None:
    every = draw(device, torch.float32)
    upstream = torch.randn(9, 5, device=device)
    expected = dict(zip(NAMES, torch.autograd.grad(run(every), every, upstream), strict=True))
    given = [each.detach().requires_grad_(name == needed) for name, each in zip(NAMES, every, strict=True)]
    backward(run(given), upstream)
    for name, each in zip(NAMES, given, strict=True):
        assert (each.grad is not None) == (name == needed)
        if name == needed:
            torch.testing.assert_close(each.grad, expected[name], rtol=0, atol=0)


def test_batched_gradients(device: Any) -> None:
    given = draw(device)
    result = run(given, relu=True)
    upstream = torch.randn(3, *result.shape, device=device, dtype=torch.float64)
    batched = torch.autograd.grad(result, given, upstream, retain_graph=True, is_grads_batched=True)
    for place in range(3):
        one = torch.autograd.grad(result, given, upstream[place], retain_graph=True)
        for mine, other in zip(batched, one, strict=True):
            torch.testing.assert_close(mine[place], other)


def test_gradients_without_memory_of_their_own(device: Any) -> None:
    """The gradient of a sum is one number, expanded."""
    given = draw(device)
    found = torch.autograd.grad(run(given, relu=True).sum(), given)
    expected = torch.autograd.grad(plain(given, relu=True).sum(), given)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", ["x", "weight", "scale", "bn_weight"])
def test_an_input_that_is_written_too_early_is_an_error(name: str) -> None:
    given = draw()
    result = run(given)
    with torch.no_grad():
        given[NAMES.index(name)].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(result.sum())


@pytest.mark.parametrize("name", ["bias", "bn_bias"])
def test_a_bias_may_be_written(name: str) -> None:
    """Of BatchNorm alone: its ReLU reads the bias again, to tell where it has cut."""
    given = draw()
    result, expected = run(given), plain(given)
    with torch.no_grad():
        given[NAMES.index(name)].mul_(2.0)
    found = torch.autograd.grad(result.square().sum(), given[0])
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given[0]))


def test_a_checkpoint_runs_the_forward_pass_twice() -> None:
    """So the running statistics follow twice, as with PyTorch's layers."""
    given = draw()
    running = Running(torch.zeros(5).double(), torch.ones(5).double(), torch.tensor(0), 0.5)
    result = checkpoint(lambda *values: run(values, running=running), *given, use_reentrant=False)
    found = torch.autograd.grad(result.square().sum(), given)
    expected = torch.autograd.grad(plain(given).square().sum(), given)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
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

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    expected = torch.autograd.grad(plain(given, relu=relu).square().sum(), leaves)
    result = run(given, relu=relu)
    given[0].zero_(), given[1].zero_()
    for mine, other in zip(torch.autograd.grad(result.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(mine, other)
