"""Products of 8-bit numbers: each function and each epilogue of users, against float64 of the dequantised inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epigemm
from tests.ops.eight_bits import (
    BF16,
    E4M3,
    E5M2,
    FP32,
    HALF,
    Case,
    called,
    check_compiled_and_exported,
    check_error,
    check_operators,
    check_vmap,
    close,
    planned,
    scaled,
    takes_8_bits,
    variant,
    widen,
)
from tests.ops.op import Arguments, Op, wide
from tests.ops.table import few, rows

M, N, K = 9, 40, 48
SCALES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "tensor": lambda count: (),
    "rows": lambda count: (count,),
    "matrix": lambda count: (count, 1),
}


def drawn(
    op: Op,
    rng: torch.Generator,
    dtype: torch.dtype = BF16,
    x: str = "rows",
    weight: str = "rows",
    **options: Any,
) -> tuple[Arguments, Arguments]:
    """Arguments in 8 bits, and those of the reference: fp64, the scales in x and the weight."""
    given = op.draw(rng, (M,), N, K, dtype=dtype, **options)
    scales = scaled(SCALES[x](M), rng), scaled(SCALES[weight](N), rng)
    given["x"], given["weight"] = given["x"].to(E4M3), (given["weight"] * 4).to(E4M3)
    reference = wide(given)
    reference["x"] = reference["x"] * scales[0].double().reshape(-1, 1)
    reference["weight"] = reference["weight"] * scales[1].double().reshape(-1, 1)
    of_weight = scales[1].t() if scales[1].dim() == 2 else scales[1]
    return {**given, "x_scale": scales[0], "weight_scale": of_weight, "out_dtype": dtype}, reference


@rows("eight_bits_values", takes_8_bits)
def test_values(op: Op, rng: torch.Generator) -> None:
    """Every type of results, every pair of scales, fp32 operands, `out`."""
    recipes = itertools.product((BF16, HALF, FP32), SCALES, SCALES)
    for number, (dtype, x, weight) in enumerate(recipes):
        given, reference = drawn(op, rng, dtype, x, weight, **variant(op, number))
        if number % 3 == 0:
            widen(op, given)
        result = called(op, given | {"accumulate": ("promoted", "fast")[number % 2]})
        assert result.dtype is dtype and result.shape == (M, N)
        close(result, op.reference(**reference))


def of_linear(rng: torch.Generator, **other: Any) -> Arguments:
    """Arguments of `linear`."""
    x, weight = torch.randn(M, K, generator=rng).to(E4M3), torch.randn(N, K, generator=rng).to(E4M3)
    one = torch.tensor(1.0)
    return {"x": x, "weight": weight, "x_scale": one, "weight_scale": one, **other}


def test_e5m2_beside_e4m3(rng: torch.Generator) -> None:
    for name in ("x", "weight"):
        given = of_linear(rng)
        given[name] = given[name].float().to(E5M2)
        close(epigemm.linear(**given), given["x"].double() @ given["weight"].double().t())


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 1), (6, 1)], ids=str)
def test_leading_axes(shape: tuple[int, ...], rng: torch.Generator) -> None:
    """The rows of x may have several axes, and so may their scales."""
    given, scale = of_linear(rng), scaled(shape, rng)
    x = given["x"][:6].reshape(2, 3, K)
    expected = (x.double().reshape(6, K) @ given["weight"].double().t()) * scale.double().reshape(-1, 1)
    close(epigemm.linear(**{**given, "x": x, "x_scale": scale}), expected.reshape(2, 3, N))


@pytest.mark.parametrize("value", [float("inf"), 0.0, float("nan")], ids=str)
def test_special_scales(value: float, rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=FP32)
    given["x_scale"] = torch.ones(M).index_fill_(0, torch.tensor([3]), value)
    expected = (given["x"].double() @ given["weight"].double().t()) * given["x_scale"].double().reshape(-1, 1)
    torch.testing.assert_close(
        epigemm.linear(**given).double(), expected, equal_nan=True, rtol=1e-5, atol=1e-4
    )


def test_nothing_is_multiplied(rng: torch.Generator) -> None:
    given = of_linear(rng)
    bias = torch.randn(N).bfloat16()
    assert epigemm.linear(**{**given, "x": given["x"][:0]}, bias=bias).shape == (0, N)
    empty = epigemm.linear(given["x"][:, :0], given["weight"][:, :0], bias, x_scale=given["x_scale"],
                           weight_scale=given["weight_scale"])  # fmt: skip
    assert torch.equal(empty, bias.expand(M, N))


def test_autocast_casts_nothing(rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=FP32, bias=torch.randn(N))
    expected = epigemm.linear_gelu(**given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(epigemm.linear_gelu(**given), expected)


def test_batch_invariance(rng: torch.Generator) -> None:
    given = of_linear(rng)
    with epigemm.batch_invariant():
        given["x_scale"] = scaled((M,), rng)
        whole = epigemm.linear_silu(**given)
        row = epigemm.linear_silu(**{**given, "x": given["x"][4:5], "x_scale": given["x_scale"][4:5]})
    assert torch.equal(whole[4:5], row)


def test_vmap(rng: torch.Generator) -> None:
    check_vmap(of_linear(rng), scaled((3, M), rng))


def test_compiled_for_any_sizes(rng: torch.Generator) -> None:
    given = of_linear(rng) | {"weight_scale": scaled((N,), rng)}
    compiled = torch.compile(epigemm.linear_silu, fullgraph=True, dynamic=True, backend="aot_eager")
    for lead in ((2, 3), (3, 3)):
        given["x"], given["x_scale"] = torch.randn(*lead, K, generator=rng).to(E4M3), scaled(lead, rng)
        assert torch.equal(compiled(**given), epigemm.linear_silu(**given))


@rows("eight_bits_compiled", lambda op: takes_8_bits(op) and few(op) and op.is_exported)
def test_compiled_and_exported(op: Op, rng: torch.Generator) -> None:
    check_compiled_and_exported(op, drawn(op, rng)[0])


def test_the_operator(rng: torch.Generator) -> None:
    given = of_linear(rng, x_scale=scaled((M,), rng))
    check_operators(given, torch.randn(N).bfloat16(), "fast", {"out_dtype": BF16})


def test_explain(rng: torch.Generator) -> None:
    found = epigemm.explain(epigemm.linear_gelu, **of_linear(rng))
    assert found.path == "reference" and "in fp32" in found.kernels[0]
    assert found.arithmetic == "ieee float32"


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_one_kernel_on_hopper(accumulate: str) -> None:
    for types in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        for result in (BF16, HALF, FP32):
            found = planned(result, accumulate, 512, types=types)
            if E5M2 in types and result is not BF16:
                assert not found.fused and f"to {str(result)[6:]}" in found.tried[0].why_not
                continue
            assert found.launches == ["fused"]
            names = "_".join(
                str(each)[6:].removeprefix("float8_").removesuffix("fn") for each in (*types, result)
            )
            assert [f"sm90_tma_{names}_{accumulate}_" in each for each in found.missing] == [True]
            # Rows that are no whole 16 bytes are padded, and copied.
            assert planned(result, accumulate, 511, types=types).launches == ["fused", "copy_of_result"]


ONE = torch.tensor(1.0)
ERRORS: dict[str, Case] = {
    "no scale of x": (RuntimeError, "x_scale: got None", {"x_scale": None}),
    "no scale of weight": (RuntimeError, "weight_scale: got None", {"weight_scale": None}),
    "no scale": (RuntimeError, "x_scale: got None", {"x_scale": None, "weight_scale": None}),
    "fp32 x": (RuntimeError, "x: got dtype torch.float32", {"x": torch.ones(M, K)}),
    "fp32 weight": (RuntimeError, "weight: got dtype torch.float32", {"weight": torch.ones(N, K)}),
    "two e5m2": (
        RuntimeError,
        "weight: got dtype torch.float8_e5m2",
        {"x": torch.ones(M, K).to(E5M2), "weight": torch.ones(N, K).to(E5M2)},
    ),
    "K": (
        RuntimeError,
        "x: got K = 40",
        {"x": torch.ones(M, 40).to(E4M3), "weight": torch.ones(N, 40).to(E4M3)},
    ),
    "another K": (RuntimeError, "x: got shape", {"x": torch.ones(M, 32).to(E4M3)}),
    "no matrix": (RuntimeError, "weight: got shape", {"weight": torch.ones(K).to(E4M3)}),
    "scale's type": (TypeError, "x_scale: got float", {"x_scale": 1.0}),
    "scale's dtype": (RuntimeError, "weight_scale: got dtype", {"weight_scale": ONE.double()}),
    "scale's device": (RuntimeError, "x_scale: got device meta", {"x_scale": ONE.to("meta")}),
    "scale's length": (RuntimeError, "x_scale: got shape [5]", {"x_scale": torch.ones(5)}),
    "out_dtype": (ValueError, "out_dtype: got torch.float64", {"out_dtype": torch.float64}),
    "out_dtype's type": (TypeError, "out_dtype: got str", {"out_dtype": "bf16"}),
    "accumulate": (ValueError, "accumulate: got 'quick'", {"accumulate": "quick"}),
    "accumulate's type": (TypeError, "accumulate: got int", {"accumulate": 1}),
    "out": (RuntimeError, "out: got dtype torch.float32", {"out": torch.ones(M, N)}),
    "bias": (RuntimeError, "bias: got dtype torch.float16", {"bias": torch.ones(N).half()}),
    "gradient": (
        RuntimeError,
        "bias: got a tensor that requires a gradient",
        {"bias": torch.ones(N).bfloat16().requires_grad_()},
    ),
    "strict": (RuntimeError, "strict: got True", {"strict": True}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, rng: torch.Generator) -> None:
    check_error(epigemm.linear_relu, of_linear(rng), ERRORS[name])


def test_elementwise_functions_refuse_8_bits(rng: torch.Generator) -> None:
    with pytest.raises(RuntimeError, match=r"x: got dtype torch\.float8_e4m3fn"):
        epigemm.sigmoid(of_linear(rng)["x"])
