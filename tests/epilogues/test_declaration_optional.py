"""Operands that may be None: each form of the function against the function itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar


@epigemm.epilogue
def scaled(
    acc: Tensor,
    bias: PerColumn | None = None,
    scale: Scalar = 2.0,
    residual: Matrix | None = None,
    gain: PerRow | None = None,
) -> Tensor:
    z = F.silu(acc if bias is None else acc + bias) * scale
    z = z if gain is None else z * gain
    return z if residual is None else z + residual


@epigemm.epilogue
def biased(acc: Tensor, bias: PerColumn | None = None) -> Tensor:
    return acc if bias is None else acc + bias


@epigemm.epilogue
def activated(acc: Tensor, bias: PerColumn, other: Matrix | None = None) -> Tensor:
    return torch.tanh(acc + bias) if other is None else torch.tanh(acc + bias) * other


NAMES = ("bias", "residual", "gain")


def drawn(chosen: tuple[str, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    rng = torch.Generator().manual_seed(5)
    shapes = {"x": (2, 3, 8), "weight": (5, 8), "bias": (5,), "residual": (2, 3, 5), "gain": (2, 3)}
    every = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}
    return every["x"], every["weight"], {name: every[name] for name in chosen}


def plain(product: Tensor, operands: dict[str, Any]) -> Tensor:
    """The function itself, in fp64."""
    seen = {name: each.double() for name, each in operands.items()}
    if "gain" in seen:
        seen["gain"] = seen["gain"].unsqueeze(-1)
    function: Callable[..., Tensor] = vars(scaled)["__wrapped__"]
    return function(product.double(), **seen)


def test_explain_names_what_runs() -> None:
    x, weight, operands = drawn(NAMES, torch.float32)
    assert "scaled(acc, scale)" in str(epigemm.explain(scaled, x, weight))
    assert "scaled(acc, bias, scale, residual, gain)" in str(epigemm.explain(scaled, x, weight, **operands))


@pytest.mark.parametrize("bias", [None, True, False])
def test_layer(bias: bool | None) -> None:
    x, _, operands = drawn(("residual", "gain"), torch.float32)
    layer = epigemm.nn.Linear(8, 5, bias, epilogue=scaled)
    assert (layer.bias is None) == (bias is False)
    own = {} if layer.bias is None else {"bias": layer.bias.detach()}
    product = x @ layer.weight.detach().t()
    for found, given in (
        (layer(x), {}),
        (layer(x, 2.0, operands["residual"]), {"residual": operands["residual"]}),
        (layer(x, **operands), operands),
        (pickle.loads(pickle.dumps(layer))(x), {}),
    ):
        torch.testing.assert_close(found.double(), plain(product, {**given, **own}), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="beside the layer's bias"):
        layer(x, bias=torch.zeros(5))


def test_layer_without_the_bias_that_is_needed() -> None:
    with pytest.raises(TypeError, match="bias: got False for an epilogue that needs its operand bias"):
        epigemm.nn.Linear(8, 5, bias=False, epilogue=activated)
    with pytest.raises(TypeError, match="bias: got False"):
        epigemm.nn.Linear.from_linear(nn.Linear(8, 5, bias=False), epilogue=activated)
    shared = nn.Linear(8, 5, bias=False)
    layer = epigemm.nn.Linear.from_linear(shared, epilogue=biased)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), shared(x))


def test_what_is_needed_is_still_asked_for() -> None:
    x, weight, _ = drawn((), torch.float32)
    with pytest.raises(TypeError, match="bias: got None"):
        activated(x, weight)
    with pytest.raises(TypeError, match="bias: got None"):
        activated(x, weight, None, torch.randn(2, 3, 5))
