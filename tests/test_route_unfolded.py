"""BatchNorm in eval with an eps that rounds to 0: PyTorch's infinities and NaNs, by functions, layers and graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.support.thorough import in_turn

M, K, N = 6, 4, 6
VARIANCES = [0.0, 1.0, -1.0, math.inf, 1e-30, 2.0]


class Layer(nn.Module):
    """A linear layer, a scale, BatchNorm and perhaps a ReLU."""

    def __init__(self, eps: float, *, bias: bool, scaled: bool, relu: bool) -> None:
        super().__init__()
        self.fc, self.bn, self.relu = nn.Linear(K, N, bias), nn.BatchNorm1d(N, eps), relu
        self.scale = nn.Parameter(torch.randn(N)) if scaled else None
        with torch.no_grad():
            for name, each in self.bn.state_dict().items():
                if name != "num_batches_tracked":
                    each.copy_(torch.tensor(VARIANCES) if name == "running_var" else torch.randn(N))
        self.eval()

    @property
    def norm(self) -> tuple[Any, ...]:
        bn = self.bn
        return bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        y = self.bn(z if self.scale is None else z * self.scale)
        return torch.relu(y) if self.relu else y

    def expected(self, x: Tensor) -> Tensor:
        """By the operator itself: `F.batch_norm` of torch 2.11 refuses an eps of 0."""
        z = self.fc(x)
        z = z if self.scale is None else z * self.scale
        mean, var, weight, bias, eps = self.norm
        y = torch.batch_norm(z, weight, bias, mean, var, False, 0.0, eps, False)
        return torch.relu(y) if self.relu else y


def by_function(layer: Layer, x: Tensor) -> Tensor:
    given = x, layer.fc.weight, layer.fc.bias
    out = None if x.requires_grad else x.new_empty(M, N)
    if layer.relu:
        return epigemm.linear_batch_norm_relu(*given, *layer.norm, out=out)
    return epigemm.linear_scale_batch_norm(*given, layer.scale, *layer.norm, out=out)


def elementwise(layer: Layer, x: Tensor) -> Tensor:
    y = epigemm.scale_batch_norm(layer.fc(x), layer.scale, *layer.norm)
    return torch.relu(y) if layer.relu else y


def by_layer(layer: Layer, x: Tensor) -> Tensor:
    if layer.relu:
        return epigemm.nn.LinearBatchNormReLU.from_layers(layer.fc, layer.bn).eval()(x)  # type: ignore[no-any-return]
    return epigemm.nn.linear_scale_batch_norm1d(x, layer.fc, layer.scale, layer.bn)


def compiled(layer: Layer, x: Tensor) -> Tensor:
    return torch.compile(layer, backend="epigemm", options={"backend": "aot_eager"})(x)  # type: ignore[no-any-return]


def fused(layer: Layer, x: Tensor) -> Tensor:
    return epigemm.fuse(layer, strict=True, options={"backend": "eager"})(x)  # type: ignore[no-any-return]


def refuses(eps: float) -> bool:
    """Whether `F.batch_norm` of this torch does."""
    try:
        F.batch_norm(torch.ones(2, 1), torch.zeros(1), torch.ones(1), eps=eps)
    except ValueError:
        return True
    return False


WAYS: list[Callable[[Layer, Tensor], Tensor]] = [by_function, elementwise, by_layer, compiled, fused]
CALLS = [(way, eps) for eps in (0.0, 1e-50, 1e-40, 1e-5) for way in WAYS]
SETTINGS = [
    {"bias": bias, "scaled": scaled, "relu": relu}
    for bias in (False, True)
    for scaled, relu in ((False, False), (True, False), (False, True))
]


@pytest.mark.parametrize(
    ("call", "setting"),
    in_turn(CALLS, SETTINGS),
    ids=lambda v: f"{v[0].__name__}-{v[1]}" if isinstance(v, tuple) else "-".join(k for k in v if v[k]),
)
@pytest.mark.usefixtures("fresh_compiler")
def test_batch_norm_without_an_eps(
    call: tuple[Callable[[Layer, Tensor], Tensor], float], setting: dict[str, bool], device: torch.device
) -> None:
    (way, eps), layer = call, Layer(call[1], **setting).to(device)
    if way in (compiled, fused) and refuses(eps):
        pytest.skip("F.batch_norm of this torch refuses the eps")
    x = torch.randn(M, K, device=device)
    with torch.no_grad():
        expected = layer.expected(x)
        torch.testing.assert_close(way(layer, x), expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    recorded = way(layer, x.requires_grad_())
    torch.testing.assert_close(recorded, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [epigemm.linear_scale_batch_norm, epigemm.linear_batch_norm_relu])
def test_strict(function: Any) -> None:
    layer = Layer(0.0, bias=True, scaled=False, relu=False)
    given = (None, None) if function is epigemm.linear_scale_batch_norm else (None,)
    with pytest.raises(RuntimeError, match="strict: got True with an eps that rounds to 0"):
        function(torch.randn(M, K), layer.fc.weight, *given, *layer.norm, strict=True)


@pytest.mark.parametrize("lies", [slice(None, None, 2), slice(N)], ids=["strided", "whole"])
def test_gradients_beside_strided_statistics(lies: slice) -> None:
    """PyTorch's own backward on a CPU reads such statistics wrongly."""
    x, gain = torch.randn(M, N, requires_grad=True), torch.randn(N, requires_grad=True)
    mean, var = torch.randn(2 * N)[lies], torch.rand(2 * N)[lies] + 0.5
    y = epigemm.scale_batch_norm(x, None, mean, var, gain, None, 1e-50)
    z = (x.double() - mean.double()) * var.double().rsqrt() * gain.double()
    for found, exact in zip(
        *(torch.autograd.grad(each.square().sum(), (x, gain)) for each in (y, z)), strict=True
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
