"""Layers that are given a matrix beside x. See test_citizens.py, too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epigemm

M, K, N = 6, 24, 16
x, matrix = torch.randn(2, M // 2, K), torch.randn(2, M // 2, N)


@pytest.mark.parametrize("bias", [True, False])
def test_what_they_compute(bias: bool) -> None:
    linear = nn.Linear(K, N, bias).eval()
    gamma = nn.Parameter(torch.randn(N))
    z = linear(x)
    for layer, expected in (
        (epigemm.nn.LinearResidual.from_linear(linear), z + matrix),
        (epigemm.nn.LinearGated.from_linear(linear), F.silu(z) * matrix),
        (epigemm.nn.LinearGated.from_linear(linear, activation="gelu"), F.gelu(z) * matrix),
        (epigemm.nn.LinearLayerScaleResidual.from_linear(linear, gamma), matrix + gamma * z),
    ):
        assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
        for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(same(x, matrix), expected, rtol=1e-5, atol=1e-5)
        assert repr(copy.deepcopy(layer)) == repr(layer)
        assert f"in_features={K}, out_features={N}, bias={bias}" in repr(layer)


def test_the_scale_of_a_layer() -> None:
    layer = epigemm.nn.LinearLayerScaleResidual(K, N, init_values=0.25, dtype=torch.float64)
    assert layer.layer_scale.dtype is torch.float64 and bool((layer.layer_scale == 0.25).all())
    assert list(layer.state_dict()) == ["weight", "bias", "layer_scale"]
    rows, ones = x.double().reshape(-1, K), torch.ones(M, dtype=torch.float64)
    layer(x.double(), matrix.double()).sum().backward()
    product = nn.functional.linear(rows, layer.weight, layer.bias).sum(0)
    expected = {"weight": 0.25 * rows.sum(0).expand(N, K), "bias": 0.25 * ones.sum().expand(N)}
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get(name, product).detach())
    vector = torch.ones(N)
    shared = epigemm.nn.LinearLayerScaleResidual.from_linear(nn.Linear(K, N), vector)
    assert dict(shared.named_buffers())["layer_scale"] is vector and len(list(shared.parameters())) == 2


@pytest.mark.parametrize("kind", [epigemm.nn.LinearGated, epigemm.nn.LinearGLU])
def test_an_activation_that_is_set_later(kind: Any) -> None:
    layer = kind(K, N)
    layer.activation = "swish"
    with pytest.raises(ValueError, match="activation: got 'swish'; accepted are gelu,"):
        layer(*[torch.randn(3, K), torch.randn(3, N)][: 1 + (kind is epigemm.nn.LinearGated)])
