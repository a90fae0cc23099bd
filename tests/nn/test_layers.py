"""Layers over existing ones, numbers and operands of their own. What all layers share: tests/ops/test_layers.py."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn, Scalar

ours = epigemm.nn
ROWS, K, N = 9, 24, 16
x, matrix, gamma = torch.randn(ROWS, K), torch.randn(ROWS, N), nn.Parameter(torch.randn(N))
Over = tuple[Callable[[nn.Linear], Any], Callable[[Tensor], Tensor], str]


@epigemm.epilogue
def clamped(acc: Tensor, bias: PerColumn, residual: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) + residual


# A layer over a linear one, what follows that in PyTorch, and the epilogue that is printed.
OVER: dict[str, Over] = {
    "Linear": (ours.Linear.from_linear, lambda z: z, "None"),
    "a user's": (
        lambda linear: ours.Linear.from_linear(linear, clamped),
        lambda z: torch.clamp(z, -1, 1) + matrix,
        "clamped",
    ),
    "ReLU": (ours.LinearReLU.from_linear, torch.relu, "bias_relu"),
    "scale": (
        lambda linear: ours.LinearSigmoidScaleResidual.from_linear(linear, scale=2.0),
        lambda z: z + 2.0 * torch.sigmoid(z),
        "sigmoid_scale_residual, precision=None, scale=2.0",
    ),
    "divisor": (
        lambda linear: ours.LinearReLUDiv.from_linear(linear, divisor=-2.0),
        lambda z: torch.relu(z) / -2.0,
        "relu_div",
    ),
    "GELU": (
        lambda linear: ours.LinearGELU.from_linear(linear, approximate="tanh"),
        lambda z: F.gelu(z, approximate="tanh"),
        "bias_gelu_tanh",
    ),
    "SiLU": (ours.LinearSiLU.from_linear, F.silu, "bias_silu"),
    "Tanh": (ours.LinearTanh.from_linear, torch.tanh, "bias_tanh"),
    "residual": (ours.LinearResidual.from_linear, lambda z: z + matrix, "residual"),
    "gated": (ours.LinearGated.from_linear, lambda z: F.silu(z) * matrix, "gated_silu"),
    "gated, GELU": (
        lambda linear: ours.LinearGated.from_linear(linear, activation="gelu"),
        lambda z: F.gelu(z) * matrix,
        "gated_gelu",
    ),
    "layer scale": (
        lambda linear: ours.LinearLayerScaleResidual.from_linear(linear, gamma),
        lambda z: matrix + gamma * z,
        "layer_scale_residual",
    ),
    "GLU": (
        lambda linear: ours.LinearGLU.from_linear(linear, activation="gelu"),
        lambda z: F.gelu(z[:, : N // 2]) * z[:, N // 2 :],
        "gated_gelu",
    ),
}
READS_MATRIX = ("a user's", "residual", "gated", "gated, GELU", "layer scale")


@pytest.mark.parametrize("name", OVER)
@pytest.mark.parametrize("bias", [True, False])
def test_over_a_linear_layer(name: str, bias: bool) -> None:
    """It shares the parameters, their changes and gradients, and the mode; copies and pickles do not."""
    if name == "a user's" and not bias:
        return  # its function has one
    make, after, epilogue = OVER[name]
    linear = nn.Linear(K, N, bias).eval()
    layer, others = make(linear), [matrix] * (name in READS_MATRIX)
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
    with torch.no_grad():
        linear.weight.mul_(2)
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x, *others), after(linear(x)), rtol=1e-5, atol=1e-5)
    layer(x, *others).sum().backward()
    assert all(each.grad is not None for each in linear.parameters())
    out = N // (2 if name == "GLU" else 1)
    assert f"in_features={K}, out_features={out}, bias={bias}" in repr(layer)
    assert f"epilogue={epilogue}" in repr(layer)


def test_over_two_layers() -> None:
    """Llama's `gate_proj` and `up_proj`; one may have a bias."""
    gate, up = nn.Linear(K, N, bias=False), nn.Linear(K, N)
    layer = ours.LinearGLU.from_linears(gate, up)
    assert layer.weight is gate.weight and layer.weight2 is up.weight and layer.bias2 is up.bias
    assert (layer.in_features, layer.out_features) == (K, N)
    assert list(layer.state_dict()) == ["weight", "weight2", "bias2"]
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x), F.silu(gate(x)) * up(x), rtol=1e-5, atol=1e-5)
    assert "bias=False" in repr(layer) and "two weights, bias2=True, activation='silu'" in repr(layer)
    assert "bias2=False" in repr(ours.LinearGLU.from_linears(up, gate))
    leaves = [*gate.parameters(), *up.parameters()]
    found, expected = (
        torch.autograd.grad(result.sum(), leaves) for result in (layer(x), F.silu(gate(x)) * up(x))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    before = [each.detach().clone() for each in leaves]
    layer.reset_parameters()
    assert not any(map(torch.equal, before, leaves))


@epigemm.epilogue
def optional(acc: Tensor, bias: PerColumn | None = None, residual: Matrix | None = None) -> Tensor:
    z = F.silu(acc if bias is None else acc + bias)
    return z if residual is None else z + residual


@pytest.mark.parametrize("bias", [None, True, False])
def test_a_users_epilogue_whose_operands_may_be_absent(bias: bool | None) -> None:
    layer = ours.Linear(K, N, bias, epilogue=optional)
    assert (layer.bias is None) == (bias is False)
    z = F.silu(F.linear(x, layer.weight, layer.bias))
    for same in (layer, ours.Linear.from_linear(linear_of(layer), optional)):
        torch.testing.assert_close(same(x), z)
        torch.testing.assert_close(same(x, matrix), z + matrix)
        torch.testing.assert_close(same(x, residual=matrix), z + matrix)


def linear_of(layer: Any) -> nn.Linear:
    made = nn.Linear(K, N, layer.bias is not None)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize(
    "kind", [ours.LinearReLU, ours.LinearReLUDiv, ours.LinearGLU, ours.LinearBatchNormReLU]
)
def test_options_of_the_constructor(kind: Any) -> None:
    module = kind(K, N, precision="ieee", strict=True, device="meta", dtype=torch.float64)
    assert all(each.is_meta and each.dtype is torch.float64 for each in module.parameters())
    assert "precision='ieee', strict=True" in repr(module)
    given = (nn.Linear(K, N), nn.BatchNorm1d(N))
    is_norm = kind is ours.LinearBatchNormReLU
    over = kind.from_layers(*given, strict=True) if is_norm else kind.from_linear(given[0], strict=True)
    for each in (kind(K, N, strict=True), kind(K, N, strict=True).eval(), over):
        with pytest.raises(RuntimeError, match="strict: got True"):
            each(x)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_scale_that_is_a_tensor_is_converted_and_copied(convert: str) -> None:
    """A buffer or a parameter: it follows the layer's type, and is in its copies."""
    for scale in (torch.tensor(2.0), nn.Parameter(torch.tensor(2.0))):
        module = ours.LinearSigmoidScaleResidual(K, N, scale=scale)
        expected = module(x).detach()
        converted = getattr(copy.deepcopy(module), convert)()
        assert converted.scale.dtype is converted.weight.dtype
        result = converted(x.to(converted.weight.dtype))
        torch.testing.assert_close(result.float(), expected, rtol=0.03, atol=0.03)
        assert isinstance(module.scale, Tensor) and module.scale.dtype is torch.float32


def test_vectors_of_the_callers() -> None:
    """One that is no Parameter is an argument of the layer, a buffer that is not drawn anew."""
    vector = torch.rand(N)
    linear, bn = nn.Linear(K, N), nn.BatchNorm1d(N)
    scaled = ours.LinearScaleBatchNorm1d.from_layers(linear, vector, bn)
    residual = ours.LinearLayerScaleResidual.from_linear(linear, vector)
    for module, name in ((scaled, "scale"), (residual, "layer_scale")):
        assert dict(module.named_buffers())[name] is vector
        before = vector.clone()
        module.reset_parameters()
        assert torch.equal(vector, before)
    ours.LinearScaleBatchNorm1d.from_layers(linear, None, bn).reset_parameters()
    made = ours.LinearLayerScaleResidual(K, N, init_values=0.25, dtype=torch.float64)
    assert made.layer_scale.dtype is torch.float64 and bool((made.layer_scale == 0.25).all())
    assert isinstance(made.layer_scale, nn.Parameter)


def test_operands_of_a_users_epilogue() -> None:
    """By place and by name. The bias is the layer's; errors: tests/net/errors.txt."""
    layer = ours.Linear(K, N, epilogue=clamped)
    z = F.linear(x, layer.weight, layer.bias)
    for limit, found in (
        (1.0, layer(x, matrix)),
        (0.25, layer(x, matrix, 0.25)),
        (0.25, layer(x, limit=0.25, residual=matrix)),
    ):
        torch.testing.assert_close(found, torch.clamp(z, -limit, limit) + matrix)
    assert pickle.loads(pickle.dumps(layer)).epilogue is clamped
