"""The elementwise functions: what follows a product, alone. Conventions as of `epigemm.functional`."""

from __future__ import annotations

from torch import Tensor

from epigemm import docstrings
from epigemm import route as _route
from epigemm.epilogues.library import BIAS_RELU, RELU_DIV, SIGMOID, SIGMOID_SCALE_RESIDUAL


@docstrings.of_elementwise
def sigmoid(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """D = 1 / (1 + exp(-x)).

    Matches `torch.sigmoid(x)` for floating x.

    Example:
        >>> epigemm.sigmoid(torch.zeros(3))
        tensor([0.5000, 0.5000, 0.5000])
    """
    return _route.elementwise(SIGMOID, x, (), out)


@docstrings.of_elementwise
def bias_relu(x: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """D = relu(x + bias), bias along the last dimension.

    Matches `torch.relu(x + bias)`; NaN stays NaN.

    Example:
        >>> epigemm.bias_relu(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[0., 2.]])
    """
    return _route.elementwise(BIAS_RELU, x, (bias,), out)


@docstrings.of_elementwise
def sigmoid_scale_residual(x: Tensor, scale: float | Tensor = 1.0, *, out: Tensor | None = None) -> Tensor:
    """D = x + scale * sigmoid(x).

    Matches `torch.sigmoid(x) * scale + x`.

    Example:
        >>> epigemm.sigmoid_scale_residual(torch.zeros(2), 2.0)
        tensor([1., 1.])
    """
    return _route.elementwise(SIGMOID_SCALE_RESIDUAL, x, (None, scale), out)


@docstrings.of_elementwise
def relu_div(x: Tensor, divisor: float | Tensor = 1.0, *, out: Tensor | None = None) -> Tensor:
    """D = relu(x) / divisor.

    Matches `torch.relu(x) / divisor`; a divisor of 0 gives inf and NaN as there.

    Example:
        >>> epigemm.relu_div(torch.tensor([-1.0, 3.0]), 2.0)
        tensor([0.0000, 1.5000])
    """
    return _route.elementwise(RELU_DIV, x, (None, divisor), out)
