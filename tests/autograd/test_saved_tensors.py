"""What a forward call saves for its derivatives: no more than unfused operators do, and changes of it are noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from tests.support.untyped import backward

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS, IN, OUT = 7, 12, 10
SCALE = torch.linspace(-2, 2, OUT)
MEAN, VAR = torch.linspace(-1, 1, OUT), torch.linspace(0.5, 2, OUT)


def residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z = F.linear(x, weight, bias)
    return z + 2.5 * torch.sigmoid(z)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(F.linear(x, weight, bias) * SCALE, MEAN, VAR)


PAIRS: dict[str, tuple[Function, Function]] = {
    "linear": (epigemm.linear, F.linear),
    "linear_relu": (epigemm.linear_relu, lambda x, w, b: F.linear(x, w, b).relu()),
    "linear_relu_div": (
        lambda x, w, b: epigemm.linear_relu_div(x, w, b, 3.0),
        lambda x, w, b: F.linear(x, w, b).relu() / 3.0,
    ),
    "residual": (lambda x, w, b: epigemm.linear_sigmoid_scale_residual(x, w, b, 2.5), residual),
    "norm": (lambda x, w, b: epigemm.linear_scale_batch_norm(x, w, b, SCALE, MEAN, VAR), norm),
}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def draw() -> list[Tensor]:
    return [torch.randn(ROWS, IN), torch.randn(OUT, IN), torch.randn(OUT)]


def gradients(
    function: Function, arguments: list[Tensor], needs: tuple[bool, ...], change: Callable[..., object]
) -> list[Tensor | None]:
    """Those of x, weight and bias, where something changes between forward and backward."""
    given = [a.clone().requires_grad_(need) for a, need in zip(arguments, needs, strict=True)]
    output = function(*given)
    with torch.no_grad():
        change(*given)
    torch.manual_seed(3)
    backward(output, torch.randn_like(output))
    return [argument.grad for argument in given]


@pairs
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, False)], ids=str)
def test_a_bias_that_is_written_through_data(
    pair: tuple[Function, Function], needs: tuple[bool, bool, bool]
) -> None:
    """The unfused operators do not look at it again."""
    arguments = draw()

    def change(x: Tensor, weight: Tensor, bias: Tensor) -> None:
        bias.data.mul_(-3)

    fused, plain = (gradients(function, arguments, needs, change) for function in pair)
    for mine, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_scale_beside_a_bias_that_is_written() -> None:
    """The gradient of the scale is made of products with the bias in them."""
    arguments = draw()
    found = []
    for folded in (True, False):
        x, weight, bias = arguments[0], arguments[1], arguments[2].clone()
        scale = SCALE.clone().requires_grad_()
        z = epigemm.linear_scale(x, weight, bias, scale) if folded else F.linear(x, weight, bias) * scale
        bias.data.zero_()
        backward(z, torch.ones_like(z))
        found.append(scale.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def relu_by_its_own_node(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A precision that holds in the backward pass, too, is nothing that PyTorch's nodes know."""
    return epigemm.linear_relu(x, weight, bias, precision="ieee")


WRITTEN = {name: PAIRS[name] for name in ("linear", "linear_relu")}
WRITTEN["own node"] = (relu_by_its_own_node, PAIRS["linear_relu"][1])


@pytest.mark.parametrize("pair", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("position", [0, 1], ids=["x", "weight"])
def test_what_no_gradient_needs_may_be_written(pair: tuple[Function, Function], position: int) -> None:
    """x beside a frozen weight (`x += block(x)`), a weight below which nothing learns."""
    arguments = draw()
    needs = (position == 0, position == 1, True)

    def change(*given: Tensor) -> None:
        given[position].mul_(2)

    fused, plain = (gradients(function, arguments, needs, change) for function in pair)
    for mine, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", PAIRS["linear_relu"], ids=["fused", "plain"])
def test_a_relu_saves_its_result(function: Function) -> None:
    arguments = [argument.requires_grad_() for argument in draw()]
    output = function(*arguments)
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(output, torch.ones_like(output))


def learned(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    gain = torch.ones(OUT, requires_grad=True)
    return epigemm.linear_scale_batch_norm(x, weight, bias, SCALE, MEAN, VAR, gain)


@pytest.mark.parametrize("function", [learned, *PAIRS["norm"]], ids=["learned", "frozen", "plain"])
@pytest.mark.parametrize("statistics", [MEAN, VAR], ids=["mean", "variance"])
def test_statistics_that_are_written(function: Function, statistics: Tensor) -> None:
    """As a forward call in training mode does: PyTorch's BatchNorm refuses to go on with them, as does a fold's node.

    Without a gradient of a vector nothing but what they were folded to is read.
    """
    before, arguments = statistics.clone(), draw()
    frozen = function is PAIRS["norm"][0]
    want = gradients(function, arguments, (True, True, True), lambda *given: None) if frozen else []
    try:
        with (
            nullcontext() if frozen else pytest.raises(RuntimeError, match="modified by an inplace operation")
        ):
            found = gradients(function, arguments, (True, True, True), lambda *given: statistics.mul_(1.5))
    finally:
        statistics.copy_(before)
    assert not frozen or all(torch.equal(a, b) for a, b in zip(found, want, strict=True))  # type: ignore[arg-type]
