"""Predicted times of kernels that belong to no chain, and of those that follow a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.fusion import costs
from epigemm.planning import plans
from tests.fusion.test_flops import graph_of
from tests.fusion.test_profit import chain_of


def test_a_kernels_time_is_the_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100: a square product is bound by what it computes, a thin one by its bytes; TF32 where it is on."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: (90, 132))

    def us(rows: int, dtype: torch.dtype = torch.float32) -> float:
        x, weight = torch.empty(1, rows, 2048, dtype=dtype), torch.empty(1, 2048, 2048, dtype=dtype)
        (node,) = [each for each in graph_of(torch.bmm, x, weight).nodes if each.op == "call_function"]
        return costs.device_us(node)

    computed = 2 * 2048**3 / 45e6
    assert us(2048) == pytest.approx(computed, rel=0.1)
    assert us(1) == pytest.approx(3.0 + (2048 + 2) * 2048 * 4 / 3e6)
    assert us(2048, torch.bfloat16) < us(2048) / 10
    torch.set_float32_matmul_precision("high")
    try:
        assert us(2048) < computed / 5
    finally:
        torch.set_float32_matmul_precision("highest")


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
