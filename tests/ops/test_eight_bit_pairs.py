"""Gated pairs of products of 8-bit numbers, to every type of results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.ops.eight_bits import BF16, E4M3, FP32, HALF, LARGEST, Case, check_error, in_blocks, same, scaled
from tests.ops.op import Arguments
from tests.ops.test_eight_bit_results import K, M
from tests.ops.test_eight_bits import of_linear


def of_pair(
    rng: torch.Generator, *, is_one: bool, weight_scale: str = "rows"
) -> tuple[Arguments, Tensor, Tensor]:
    """Arguments of `linear_glu`, and both products in fp64, without their biases."""
    half = 136
    x, weight = torch.randn(M, K, generator=rng).to(E4M3), torch.randn(2 * half, K, generator=rng).to(E4M3)
    scales = scaled((M,), rng), scaled((2 * half,) if weight_scale == "rows" else (), rng)
    both = (x.double() @ weight.double().t()) * scales[0].double()[:, None] * scales[1].double()
    bias = torch.randn(2 * half, generator=rng).bfloat16()
    given: Arguments = {"x": x, "x_scale": scales[0], "weight_scale": scales[1]}
    given |= {"weight": weight, "bias": bias} if is_one else {
        "weight": weight[:half], "weight2": weight[half:], "bias": bias[:half], "bias2": bias[half:]
    }  # fmt: skip
    first, second = (both + bias.double()).chunk(2, -1)
    return given, first, second


@pytest.mark.parametrize("is_one", [True, False], ids=["one weight", "two weights"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_pairs(activation: str, is_one: bool, rng: torch.Generator) -> None:
    for weight_scale in ("rows", "tensor"):
        given, first, second = of_pair(rng, is_one=is_one, weight_scale=weight_scale)
        given["activation"] = activation
        expected = getattr(torch.nn.functional, activation)(first) * second
        for number, dtype in enumerate((BF16, HALF, FP32)):
            # The biases have the result's type, or fp32.
            biases = {
                name: given[name].to(FP32 if number % 2 else dtype)
                for name in ("bias", "bias2")
                if name in given
            }
            result = epigemm.linear_glu(
                **given | biases, out_dtype=dtype, accumulate=("promoted", "fast")[number % 2]
            )
            largest = float(expected.abs().max())
            assert result.dtype is dtype
            torch.testing.assert_close(
                result.double(),
                expected,
                rtol=2 * torch.finfo(dtype).eps,
                atol=2e-3 * largest,
                check_dtype=False,
            )
        y = epigemm.linear_glu(**given)
        found = epigemm.linear_glu(**given, out_dtype=E4M3, out_scale="1x128")
        assert same(found, in_blocks(y))
        result = epigemm.linear_glu(**given, out_dtype=E4M3, out_scale=0.1)
        exact = (expected / 0.1).clamp(-LARGEST, LARGEST)
        bound = (exact.abs() * 2.0**-4).clamp(min=2.0**-10) + 0.02 * (1 + exact.abs())
        assert bool(((result.double() - exact).abs() <= bound).all())
        out = torch.empty_like(result)
        assert epigemm.linear_glu(**given, out_dtype=E4M3, out_scale=0.1, out=out) is out and same(
            out, result
        )


def test_a_pair_is_compiled(rng: torch.Generator) -> None:
    given, *_ = of_pair(rng, is_one=True)
    every: list[Arguments] = [
        {},
        {"out_dtype": E4M3, "out_scale": 0.1},
        {"out_dtype": E4M3, "out_scale": "1x128"},
    ]
    for options in every:
        whole: Any = functools.partial(epigemm.linear_glu, **{**given, **options})
        call: Any = torch.compile(lambda x, whole=whole: whole(x=x), fullgraph=True, backend="aot_eager")  # type: ignore[misc]
        assert same(call(given["x"]), epigemm.linear_glu(**given | options))


ERRORS: dict[str, Case] = {
    "scale of one half": (RuntimeError, "weight_scale: got shape [20]", {"weight_scale": torch.ones(20)}),
    "no scale": (RuntimeError, "x_scale: got None", {"x_scale": None}),
    "weight2": (RuntimeError, "weight2: got dtype torch.bfloat16", {"weight2": torch.ones(40, K).bfloat16()}),
    "its shape": (RuntimeError, "weight2: got shape", {"weight2": torch.ones(8, K).to(E4M3)}),
    "odd": (RuntimeError, "weight: got shape [5, 48]", {"weight": torch.ones(5, K).to(E4M3)}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, rng: torch.Generator) -> None:
    check_error(epigemm.linear_glu, of_linear(rng), ERRORS[name])
