"""What PyTorch does to any module: meta devices, assigned states, modes, functional calls.

Copies, pickles, `.to(dtype)`: `test_layers.py`; the packs of changed weights: `test_packs.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm

ROWS, IN, OUT = 9, 24, 16
Layers = Callable[..., nn.Module]


class WithMatrix(nn.Module):
    """A layer that is given a matrix beside x: some of x's columns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x[..., :OUT])


LAYERS: dict[str, Layers] = {
    "LinearReLU": lambda **o: epigemm.nn.LinearReLU(IN, OUT, **o),
    "LinearSigmoidScaleResidual": lambda **o: epigemm.nn.LinearSigmoidScaleResidual(IN, OUT, scale=2.0, **o),
    "LinearReLUDiv": lambda **o: epigemm.nn.LinearReLUDiv(IN, OUT, divisor=-2.0, **o),
    "LinearScaleBatchNorm1d": lambda **o: epigemm.nn.LinearScaleBatchNorm1d(IN, OUT, **o),
    "LinearBatchNormReLU": lambda **o: epigemm.nn.LinearBatchNormReLU(IN, OUT, **o),
    "LinearGELU": lambda **o: epigemm.nn.LinearGELU(IN, OUT, **o),
    "LinearGLU": lambda **o: epigemm.nn.LinearGLU(IN, OUT, **o),
    "LinearGLU of two": lambda **o: epigemm.nn.LinearGLU.from_linears(
        nn.Linear(IN, OUT, **o), nn.Linear(IN, OUT, **o)
    ),
    "LinearResidual": lambda **o: WithMatrix(epigemm.nn.LinearResidual(IN, OUT, **o)),
    "LinearGated": lambda **o: WithMatrix(epigemm.nn.LinearGated(IN, OUT, **o)),
    "LinearLayerScaleResidual": lambda **o: WithMatrix(
        epigemm.nn.LinearLayerScaleResidual(IN, OUT, init_values=0.5, **o)
    ),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def x_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, IN, dtype=dtype)


@layers
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("context", [False, True], ids=["argument", "context"])
def test_made_on_the_meta_device(make: Layers, assign: bool, context: bool) -> None:
    filled, x = make().eval(), x_of()
    if context:
        with torch.device("meta"):
            module = make().eval()
    else:
        module = make(device="meta").eval()
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    on_meta = module(x.to("meta"))
    assert on_meta.is_meta and on_meta.shape == (ROWS, OUT)
    state = filled.state_dict()
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(state, assign=assign)
    assert torch.equal(module(x), filled(x))
    if assign:
        assert all(value.data_ptr() == state[name].data_ptr() for name, value in module.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_scale_that_is_a_tensor_is_converted_and_copied(convert: str) -> None:
    """A buffer or a parameter: it follows the layer's type, and is in its copies."""
    for scale in (torch.tensor(2.0), nn.Parameter(torch.tensor(2.0))):
        module = epigemm.nn.LinearSigmoidScaleResidual(IN, OUT, scale=scale)
        expected = module(x := x_of()).detach()
        converted = getattr(copy.deepcopy(module), convert)()
        assert converted.scale.dtype is converted.weight.dtype
        result = converted(x.to(converted.weight.dtype))
        torch.testing.assert_close(result.float(), expected, rtol=0.03, atol=0.03)
        assert isinstance(module.scale, Tensor) and module.scale.dtype is torch.float32


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(value, found) for (name, value), (again, found) in pairs)


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reset_parameters(make: Layers, dtype: torch.dtype) -> None:
    """A layer draws what its constructor draws; a loop over a model's modules leaves no tensor as it was."""
    torch.manual_seed(1)
    expected, other = make(dtype=dtype), make(dtype=dtype)
    inner: Any = other.layer if isinstance(other, WithMatrix) else other
    inner.train()
    if hasattr(inner, "bn"):
        inner(x_of(dtype))
    assert not same(expected, other)
    torch.manual_seed(1)
    inner.reset_parameters()
    assert same(expected, other)

    with torch.device("meta"):
        on_meta = nn.Sequential(make(dtype=dtype))
    on_meta.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in on_meta.state_dict().values():
            tensor.fill_(77)
    for module in on_meta.modules():
        if hasattr(module, "reset_parameters"):
            reset: Any = module.reset_parameters
            reset()
    for name, tensor in on_meta[0].state_dict().items():
        assert not (tensor == 77).any(), name
        assert (
            torch.equal(tensor, expected.state_dict()[name])
            or "weight" in name
            or "bias" in name
            or (name == "scale")
        ), name


def test_what_a_caller_gave_is_not_drawn_anew() -> None:
    """A scale that is no Parameter is an argument of the layer."""
    vector = torch.rand(OUT)
    linear, bn = nn.Linear(IN, OUT), nn.BatchNorm1d(OUT)
    scaled = epigemm.nn.LinearScaleBatchNorm1d.from_layers(linear, vector.clone(), bn)
    residual = epigemm.nn.LinearLayerScaleResidual.from_linear(linear, vector.clone())
    for module, name in ((scaled, "scale"), (residual, "layer_scale")):
        module.reset_parameters()
        assert torch.equal(getattr(module, name), vector)
    epigemm.nn.LinearScaleBatchNorm1d.from_layers(linear, None, bn).reset_parameters()
