"""`LinearGLU` over one layer with the rows of both products, and over two layers.

See test_citizens.py, and packs of both weights in tests/packs/test_packs.py.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epigemm
from tests.support.untyped import backward

M, K, N = 6, 24, 16
x = torch.randn(2, M // 2, K)


@pytest.mark.parametrize("bias", [True, False])
def test_over_one_layer(bias: bool) -> None:
    """The first rows are activated."""
    linear = nn.Linear(K, 2 * N, bias).eval()
    layer = epigemm.nn.LinearGLU.from_linear(linear, activation="gelu")
    first, second = linear(x).chunk(2, -1)
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
    assert (layer.in_features, layer.out_features) == (K, N)
    assert list(layer.state_dict()) == list(linear.state_dict())
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x), F.gelu(first) * second, rtol=1e-5, atol=1e-5)
    assert f"in_features={K}, out_features={N}, bias={bias}, epilogue=" in repr(layer)
    assert "gated_gelu" in repr(layer) and "activation='gelu'" in repr(layer)


def test_over_two_layers() -> None:
    """Llama's `gate_proj` and `up_proj`; one may have a bias."""
    gate, up = nn.Linear(K, N, bias=False), nn.Linear(K, N)
    layer = epigemm.nn.LinearGLU.from_linears(gate, up)
    assert layer.weight is gate.weight and layer.weight2 is up.weight and layer.bias2 is up.bias
    assert (layer.in_features, layer.out_features) == (K, N)
    assert list(layer.state_dict()) == ["weight", "weight2", "bias2"]
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x), F.silu(gate(x)) * up(x), rtol=1e-5, atol=1e-5)
    assert " bias=False" in repr(layer)
    assert "two weights, bias2=True, activation='silu'" in repr(layer)
    assert "bias2=False" in repr(epigemm.nn.LinearGLU.from_linears(up, gate))
    backward(layer(x).sum())
    expected = [copy.deepcopy(gate), copy.deepcopy(up)]
    backward((F.silu(expected[0](x)) * expected[1](x)).sum())
    for mine, other in ((gate.weight, expected[0].weight), (up.weight, expected[1].weight)):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_made_as_a_linear_layer_is() -> None:
    torch.manual_seed(1)
    layer = epigemm.nn.LinearGLU(K, N, activation="tanh", dtype=torch.float64)
    torch.manual_seed(1)
    linear = nn.Linear(K, 2 * N, dtype=torch.float64)
    assert torch.equal(layer.weight, linear.weight) and layer.bias is not None
    other = epigemm.nn.LinearGLU(K, N, activation="tanh", dtype=torch.float64)
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other(x.double()), layer(x.double()))


def test_bad_input() -> None:
    """Other words: tests/net/errors.txt."""
    with pytest.raises(ValueError, match="linear: got 15 out_features; accepted is an even number"):
        epigemm.nn.LinearGLU.from_linear(nn.Linear(K, 15))
    with pytest.raises(RuntimeError, match=r"x: got shape \[2, 3, 23\]"):
        epigemm.nn.LinearGLU(K, N)(x[..., 1:])
