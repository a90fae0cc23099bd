"""A bias that cancels the product, in 16 bits: however a call is made, it is added before the sum is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.support.formulas import formula

tanh_of_sum = epigemm.epilogue(formula("acc, bias: PerColumn -> torch.tanh(acc + bias)"))


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(16, 64, generator=generator) + 8).to(dtype)
    weight = (torch.rand(8, 64, generator=generator) + 1).to(dtype)
    return x, weight, -(x @ weight.t()).float().mean(0).to(dtype)


def assert_near(found: Tensor, wanted: Tensor, z: Tensor) -> None:
    """Two roundings of a sum, of a slope of at most 1; the product alone is some 800, of 64 terms that are summed."""
    summed = 64 * 2.0**-24 * 800
    bound = (
        2 * torch.finfo(found.dtype).eps * float(z.detach().abs().max() + wanted.detach().abs().max())
        + summed
    )
    assert float((found.double() - wanted).detach().abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["fuse", "backend", "epilogue"])
def test_autocast_rounds_the_bias_with_the_product(how: str, dtype: torch.dtype) -> None:
    x, weight, bias = (each.float() for each in operands(dtype))
    layer = nn.Linear(64, 8)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    model = nn.Sequential(layer, nn.Tanh())
    z = F.linear(x.double(), weight.double(), bias.double())
    call: Any = {
        "fuse": lambda: epigemm.fuse(model)(x),
        "backend": lambda: torch.compile(model, backend="epigemm", options={"backend": "aot_eager"})(x),
        "epilogue": lambda: tanh_of_sum(x, weight, bias),
    }[how]
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert_near(call(), torch.tanh(z), z)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A bias that would be folded, of an identity."""
    zeros, ones = torch.zeros(8), torch.ones(8)
    return epigemm.linear_scale_batch_norm(x, weight, bias, ones.to(x.dtype), zeros, ones, eps=0.0)


FUNCTIONS: dict[str, Any] = {
    "linear": epigemm.linear,
    "absent scale": lambda x, weight, bias: epigemm.linear_scale(x, weight, bias, None),
    "norm": norm,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["vmap", "vjp", "compiled", "recorded", "autocast"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_way_to_call(name: str, how: str, dtype: torch.dtype) -> None:
    x, weight, bias = operands(dtype)

    def run(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x, weight, bias)  # type: ignore[no-any-return]

    weight.requires_grad_(how in ("compiled", "recorded"))
    calls: dict[str, Any] = {
        "vmap": lambda: torch.vmap(run)(x[:, None])[:, 0],
        "vjp": lambda: torch.func.vjp(run, x)[0],
        "compiled": lambda: torch.compile(run, backend="aot_eager")(x),
        "recorded": lambda: run(x),
        "autocast": lambda: run(x),
    }
    is_cast = how == "autocast" and dtype != torch.float32
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=is_cast):
        found = calls[how]()
    z = F.linear(x.double(), weight.double(), bias.double())
    assert_near(found, z, z)
