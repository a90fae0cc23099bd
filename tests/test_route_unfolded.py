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
        assert self.bn.running_mean is not None and self.bn.running_var is not None
        self.bn.running_mean.normal_()
        self.bn.running_var.copy_(torch.tensor(VARIANCES))
        nn.init.normal_(self.bn.weight)
        nn.init.normal_(self.bn.bias)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        y = self.bn(z if self.scale is None else z * self.scale)
        return torch.relu(y) if self.relu else y

    def expected(self, x: Tensor) -> Tensor:
        """By the operator itself: `F.batch_norm` of torch 2.11 refuses an eps of 0."""
        z, bn = self.fc(x), self.bn
        z = z if self.scale is None else z * self.scale
        statistics = (bn.running_mean, bn.running_var)
        y = torch.batch_norm(z, bn.weight, bn.bias, *statistics, False, 0.0, bn.eps, False)
        return torch.relu(y) if self.relu else y


def by_function(layer: Layer, x: Tensor) -> Tensor:
    bn: Any = layer.bn
    norm = (bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps)
    out = None if x.requires_grad else x.new_empty(M, N)
    if layer.relu:
        return epigemm.linear_batch_norm_relu(x, layer.fc.weight, layer.fc.bias, *norm, out=out)
    return epigemm.linear_scale_batch_norm(x, layer.fc.weight, layer.fc.bias, layer.scale, *norm, out=out)


def elementwise(layer: Layer, x: Tensor) -> Tensor:
    bn: Any = layer.bn
    norm = (bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps)
    y = epigemm.scale_batch_norm(F.linear(x, layer.fc.weight, layer.fc.bias), layer.scale, *norm)
    return torch.relu(y) if layer.relu else y


def by_layer(layer: Layer, x: Tensor) -> Tensor:
    if layer.relu:
        return epigemm.nn.LinearBatchNormReLU.from_layers(layer.fc, layer.bn).eval()(x)  # type: ignore[no-any-return]
    return epigemm.nn.linear_scale_batch_norm1d(x, layer.fc, layer.scale, layer.bn)


def compiled(layer: Layer, x: Tensor) -> Tensor:
    return torch.compile(layer, backend="epigemm", options={"backend": "aot_eager"})(x)  # type: ignore[no-any-return]


def fused(layer: Layer, x: Tensor) -> Tensor:
    return epigemm.fuse(layer, strict=True, options={"backend": "eager"})(x)  # type: ignore[no-any-return]


def _takes(eps: float) -> bool:
    try:
        F.batch_norm(torch.ones(2, 1), torch.zeros(1), torch.ones(1), eps=eps)
    except ValueError:
        return False
    return True


WAYS: list[Callable[[Layer, Tensor], Tensor]] = [by_function, elementwise, by_layer, compiled, fused]


CALLS = [(way, eps) for eps in (0.0, 1e-50, 1e-40, 1e-5) for way in WAYS]
# A bias, a scale, a ReLU.
SETTINGS = [
    (bias, *rest) for bias in (False, True) for rest in ((False, False), (True, False), (False, True))
]


@pytest.mark.parametrize(
    ("call", "setting"), in_turn(CALLS, SETTINGS), ids=lambda v: getattr(v[0], "__name__", "") + str(v[1:])
)
def test_batch_norm_without_an_eps(
    call: tuple[Callable[[Layer, Tensor], Tensor], float],
    setting: tuple[bool, bool, bool],
    device: torch.device,
) -> None:
    torch.compiler.reset()
    (way, eps), (bias, scaled, relu) = call, setting
    layer = Layer(eps, bias=bias, scaled=scaled, relu=relu).to(device)
    x = torch.randn(M, K, device=device)
    with torch.no_grad():
        expected = layer.expected(x)
        if way in (compiled, fused) and not _takes(eps):
            pytest.skip("F.batch_norm of this torch refuses the eps")
        torch.testing.assert_close(way(layer, x), expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    torch.testing.assert_close(way(layer, x), expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_strict() -> None:
    layer, x = Layer(0.0, bias=True, scaled=False, relu=False), torch.randn(M, K)
    bn: Any = layer.bn
    norm = (bn.running_mean, bn.running_var, bn.weight, bn.bias, 0.0)
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (epigemm.linear_scale_batch_norm, (layer.fc.bias, None)),
        (epigemm.linear_batch_norm_relu, (layer.fc.bias,)),
    ]
    for function, given in functions:
        with pytest.raises(RuntimeError, match="strict: got True with an eps that rounds to 0"):
            function(x, layer.fc.weight, *given, *norm, strict=True)
