"""Steps compute what PyTorch computes: numbers of its types, and roundings to 16 bits where it rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import trace

FP16, BF16 = torch.float16, torch.bfloat16
EDGES = [0.0, 0.1, 0.3, -0.5, 1.0, 2.5, -2.0, 3.0, 65504.0, -104.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        # A negative number on the left of an operator.
        lambda acc: (-2.0) ** acc,
        lambda acc: (-2.0) ** (-acc) - (-1.0) * acc / -3.0,
        lambda acc: torch.where(acc > -2.0, -2.5 % acc, -2.5 // acc),
        # What is filled has the type that is asked for.
        lambda acc: torch.full((), 2.7, dtype=torch.bool) * acc,
        lambda acc: torch.full((), 0.1, dtype=FP16) * acc,
        # Numbers of fp32 beside fp64.
        lambda acc: torch.full((), 0.1) * acc,
        lambda acc: torch.tensor(0.1) * acc + torch.scalar_tensor(0.3),
        lambda acc: torch.full_like(acc, 0.1, dtype=torch.float32) * acc,
        lambda acc: torch.full_like(acc, 0.1) * acc + acc.new_tensor(0.7),
        lambda acc: torch.full((), 0.1, dtype=acc.dtype) * torch.where(acc > 1, 0.1, acc),
        lambda acc: torch.where(acc > 1, 0.1, 0.2) * acc + (acc > 2) * 0.3,
        # A cast to fp32 rounds fp64, and what is made of the result until it meets fp64.
        lambda acc: (acc.float() * 0.1 + 1e-9) * acc,
        lambda acc: acc.to(torch.float32).to(acc.dtype) * 0.1,
        lambda acc: (acc.type(torch.float32) % 0.3 > 0.1) * acc + (acc.float() == 0.1).to(acc.dtype),
        lambda acc: (acc.float().nan_to_num() - acc.half().float() / 3.0).to(acc.dtype),
    ],
)
def test_numbers_are_those_of_torch(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    acc = torch.tensor([EDGES], dtype=dtype)
    assert torch.equal(torch.nan_to_num(trace(function).reference(acc), 7.0), function(acc).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        # A number beside a value of 16 bits is rounded like it, but not as a divisor.
        *(lambda h: h == 0.1, lambda h: h > 0.1, lambda h: h <= 0.3, lambda h: h >= torch.full((), 0.3)),
        *(lambda h: h % 0.3, lambda h: 0.3 % h, lambda h: torch.fmod(h, 0.3), lambda h: h // 0.3),
        *(
            lambda h: 0.3 // h,
            lambda h: h**0.3,
            lambda h: 0.3**h,
            lambda h: torch.atan2(h, torch.full((), 0.3)),
        ),
        # The largest number is that of the type.
        *(lambda h: h.nan_to_num(), lambda h: h.nan_to_num(0.1, 1e9, -0.3)),
        # What PyTorch computes in fp32 and rounds once.
        *(F.hardswish, F.hardsigmoid, F.mish, F.silu, F.logsigmoid, lambda h: torch.lerp(h, -h, 0.3)),
        *(lambda h: F.threshold(h, 0.1, 0.2), lambda h: torch.addcmul(h, h, h), lambda h: F.celu(h, 0.7)),
    ],
)
def test_steps_of_16_bits_round_as_torch_does(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def casts(acc: Tensor) -> Tensor:
        return function(acc.to(dtype)).to(acc.dtype)

    acc = torch.cat([torch.tensor(EDGES), torch.linspace(-4, 4, 243)])[None]
    actual, expected = trace(casts).reference(acc), casts(acc)
    # A last bit of fp32 may turn a tie: one unit of 16 bits then.
    bound = torch.finfo(dtype).eps * expected.abs().nan_to_num(0.0, 0.0, 0.0)
    exact = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool((exact | ((actual - expected).abs() <= bound)).all())
    assert int(exact.sum()) >= 0.99 * exact.numel()
