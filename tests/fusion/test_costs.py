"""Predicted times of the kernels that follow a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.fusion import costs
from tests.fusion.test_profit import chain_of


def test_one_kernel_moves_less_than_several() -> None:
    x, weight, bias, other = torch.rand(64, 8), torch.rand(16, 8), torch.rand(16), torch.rand(64, 16)

    def swish(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor) -> Tensor:
        z = F.linear(x, weight, bias)
        return torch.tanh((z * torch.sigmoid(z)).view(64, 16)) + other

    chain = chain_of(swish, x, weight, bias, other)
    assert [node.name for node in costs.kernels_behind(chain)] == ["sigmoid", "mul", "tanh", "add"]
    matrix = 64 * 16 * 4 / costs._BYTES_PER_US
    assert costs.one_kernel_us(chain) == pytest.approx(costs._LEAST_US + 3 * matrix)
    several = sum(map(costs.device_us, costs.kernels_behind(chain)))
    assert several == pytest.approx(4 * costs._LEAST_US + (2 + 3 + 2 + 3) * matrix)
