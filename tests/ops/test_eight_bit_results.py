"""Results of 8 bits, and gated pairs: each function and each epilogue of users, with one scale or with one a block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.ops.eight_bits import (
    BF16,
    BLOCK,
    E4M3,
    E5M2,
    FP32,
    HALF,
    LARGEST,
    Case,
    called,
    cast,
    check_compiled_and_exported,
    check_error,
    check_operators,
    check_quantised,
    check_vmap,
    in_blocks,
    planned,
    same,
    scaled,
    takes_8_bits,
    widen,
)
from tests.ops.op import Arguments, Op
from tests.ops.table import few, rows
from tests.ops.test_eight_bits import drawn, of_linear

M, N, K = 9, 300, 48  # two blocks and a part of one


@rows("eight_bit_results_values", takes_8_bits)
def test_values(op: Op, rng: torch.Generator) -> None:
    """One scale: a rounding of e4m3. Blocks: the bf16 result, quantised."""
    given, reference = drawn(op, rng)
    expected = op.reference(**reference)
    for scale in (0.03, torch.tensor(0.03)):
        check_quantised(called(op, given | {"out_dtype": E4M3, "out_scale": scale}), expected, 0.03)
    found = op.call(**given | {"out_dtype": E4M3, "out_scale": "1x128"})
    assert same(found, in_blocks(op.call(**given)))


@rows("eight_bit_results_wide_operands", takes_8_bits)
def test_fp32_operands(op: Op, rng: torch.Generator) -> None:
    given, _ = drawn(op, rng)
    widen(op, given)
    found = op.call(**given | {"out_dtype": E4M3, "out_scale": "1x128"})
    assert same(found, in_blocks(op.call(**given)))


@epigemm.epilogue
def matrix_itself(acc: Tensor, m: epigemm.Matrix) -> Tensor:
    """Without a product: acc is 0."""
    result: Tensor = m * (acc + 1)
    return result


def special(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """Ties of e4m3 and numbers beside them, subnormals, zeros of both signs, what saturates, infinities, NaN."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = every[every.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, side)) for side in (-math.inf, math.inf)]
    others = torch.tensor(
        [0.0, -0.0, 448, 464, 465, 1e30, -480, math.inf, -math.inf, math.nan, 2.0**-10, 1e-30]
    )
    pool = torch.cat([finite, ties, *near, others])
    return pool[torch.randint(len(pool), (rows, columns), generator=rng)]


def of_matrix(matrix: Tensor, **options: Any) -> Any:
    """A matrix as the result of a product."""
    rows, columns = matrix.shape
    x, weight = torch.zeros(rows, 16).to(E4M3), torch.zeros(columns, 16).to(E4M3)
    one = torch.tensor(1.0)
    return matrix_itself(x, weight, matrix, x_scale=one, weight_scale=one, out_dtype=E4M3, **options)


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0, 2.0**-20, 1e20])
def test_roundings_are_those_of_torch(scale: float, rng: torch.Generator) -> None:
    matrix = special(40, N, rng)
    expected = cast(matrix / torch.tensor(scale))
    assert same(of_matrix(matrix, out_scale=scale), expected)
    assert same(of_matrix(matrix, out_scale=torch.tensor(scale)), expected)


def test_special_blocks(rng: torch.Generator) -> None:
    """Zeros, numbers below the least scale, NaN and infinities, each in a block of its own."""
    matrix = torch.randn(6, N, generator=rng)
    matrix[0], matrix[1], matrix[2, 5], matrix[3, 200], matrix[4, 299] = (
        0,
        2.0**-120,
        math.nan,
        math.inf,
        -math.inf,
    )
    result, scales = of_matrix(matrix, out_scale="1x128")
    assert same((result, scales), in_blocks(matrix.bfloat16()))
    assert bool(result[2, :BLOCK].isnan().all()) and not bool(result[2, BLOCK:].isnan().any())
    assert bool((scales[:2] == torch.tensor(2.0**-100) / LARGEST).all()) and bool((result[:2] == 0).all())
    assert math.isinf(float(scales[3, 1])) and bool(result[3, 200].isnan()) and float(result[3, 201]) == 0


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (0, 3)], ids=str)
def test_leading_axes(lead: tuple[int, ...], rng: torch.Generator) -> None:
    """The scales of consecutive rows lie side by side, as torch's product and the next layer read them."""
    x, weight = torch.randn(*lead, K, generator=rng).to(E4M3), torch.randn(N, K, generator=rng).to(E4M3)
    one = torch.tensor(1.0)
    options: Arguments = {"x_scale": one, "weight_scale": one}
    result, scales = epigemm.linear_silu(x, weight, **options, out_dtype=E4M3, out_scale="1x128")
    y = epigemm.linear_silu(x, weight, **options)
    assert result.shape == (*lead, N) and scales.shape == (*lead, 3) and scales.dtype is FP32
    assert same((result, scales), in_blocks(y))
    count = math.prod(lead)
    if lead and count:
        flat = scales.reshape(count, 3)
        assert flat.data_ptr() == scales.data_ptr() and flat.stride() == (1, count)


def test_out_beside_blocks(rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=E4M3, out_scale="1x128")
    expected = epigemm.linear_gelu(**given)
    out = torch.empty_like(expected[0])
    found = epigemm.linear_gelu(**given, out=out)
    assert found[0] is out and same(found, expected)


def test_batch_invariance(rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=E4M3, out_scale="1x128", x_scale=scaled((M,), rng))
    with epigemm.batch_invariant():
        whole, scales = epigemm.linear_silu(**given)
        row, scale = epigemm.linear_silu(**given | {"x": given["x"][4:5], "x_scale": given["x_scale"][4:5]})
    assert same(whole[4:5], row) and torch.equal(scales[4:5], scale)


def test_autocast_casts_nothing(rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=E4M3, out_scale="1x128")
    expected = epigemm.linear_gelu(**given)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(epigemm.linear_gelu(**given), expected)


@pytest.mark.parametrize("out_scale", [0.1, "1x128"])
def test_vmap(out_scale: float | str, rng: torch.Generator) -> None:
    check_vmap(of_linear(rng, out_dtype=E4M3, out_scale=out_scale), scaled((3, M), rng))


@pytest.mark.parametrize("out_scale", [0.1, torch.tensor(0.1), "1x128"], ids=["number", "tensor", "blocks"])
@rows("eight_bit_results_compiled", lambda op: takes_8_bits(op) and few(op) and op.is_exported)
def test_compiled_and_exported(op: Op, out_scale: Any, rng: torch.Generator) -> None:
    given, _ = drawn(op, rng)
    given |= {"out_dtype": E4M3, "out_scale": out_scale}
    check_compiled_and_exported(op, given)


def test_the_operators(rng: torch.Generator) -> None:
    given = of_linear(rng, x_scale=scaled((M,), rng))
    options = {"out_dtype": E4M3, "out_scale": torch.tensor(0.5)}
    check_operators(given, torch.randn(40).bfloat16(), "fast", options)


@pytest.mark.parametrize("out_scale", [0.1, "1x128"])
def test_explain(out_scale: float | str, rng: torch.Generator) -> None:
    for function in (epigemm.linear_gelu, epigemm.linear_glu):
        found = epigemm.explain(function, **of_linear(rng, out_dtype=E4M3, out_scale=out_scale))
        assert (
            found.path == "reference" and found.kernels[-1] == "PyTorch, quantisation to torch.float8_e4m3fn"
        )


# --- plans ------------------------------------------------------------------------------------------------------------


RESULTS = [(BF16, None, "bfloat16"), (HALF, None, "float16"), (FP32, None, "float32"),
           (E4M3, 0.1, "bfloat16_to_e4m3"), (E4M3, "1x128", "bfloat16_to_blocks")]  # fmt: skip


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["one product", "a pair"])
def test_one_kernel_on_hopper(is_pair: bool, accumulate: str) -> None:
    for dtype, scale, name in RESULTS:
        for m in (1, 256, 4096):
            found = planned(dtype, accumulate, 512, scale=scale, is_pair=is_pair, m=m)
            if is_pair and accumulate == "promoted" and scale == "1x128":
                assert not found.fused and "by two weights in this arithmetic" in found.tried[0].why_not
                continue
            assert found.launches == ["fused"]
            assert [f"sm90_tma_e4m3_e4m3_{name}_{accumulate}_" in each for each in found.missing] == [True]
            assert [each.endswith("_pair") for each in found.missing] == [is_pair]
        if not is_pair:  # rows that are no whole 16 bytes are padded, and copied
            launches = planned(dtype, accumulate, 511, scale=scale).launches
            assert launches == ["fused", "copy_of_result"]


ERRORS: dict[str, Case] = {
    "no scale": (RuntimeError, "out_scale: got None with out_dtype=torch.float8_e4m3fn", {"out_scale": None}),
    "another result": (
        RuntimeError,
        "out_scale: got 0.5 with a result of torch.bfloat16",
        {"out_dtype": None},
    ),
    "fp32": (RuntimeError, "out_scale: got 0.5 with a result of torch.float32", {"out_dtype": FP32}),
    "a tensor": (
        RuntimeError,
        "out_scale: got a tensor with a result of torch.bfloat16",
        {"out_scale": torch.ones(()), "out_dtype": BF16},
    ),
    "blocks": (
        RuntimeError,
        "out_scale: got '1x128' with a result of torch.bfloat16",
        {"out_scale": "1x128", "out_dtype": BF16},
    ),
    "an unknown recipe": (ValueError, "out_scale: got '1x32'", {"out_scale": "1x32"}),
    "rows": (ValueError, "out_scale: got 'row'", {"out_scale": "row"}),
    "its type": (TypeError, "out_scale: got list", {"out_scale": [1.0]}),
    "a bool": (TypeError, "out_scale: got bool", {"out_scale": True}),
    "zero": (ValueError, "out_scale: got 0", {"out_scale": 0.0}),
    "negative": (ValueError, "out_scale: got -2", {"out_scale": -2}),
    "nan": (ValueError, "out_scale: got nan", {"out_scale": math.nan}),
    "inf": (ValueError, "out_scale: got inf", {"out_scale": math.inf}),
    "beyond fp32": (ValueError, "out_scale: got 1e+39", {"out_scale": 1e39}),
    "dtype": (RuntimeError, "out_scale: got dtype torch.bfloat16", {"out_scale": torch.ones(()).bfloat16()}),
    "device": (RuntimeError, "out_scale: got device meta", {"out_scale": torch.ones((), device="meta")}),
    "shape": (RuntimeError, "out_scale: got shape [1]", {"out_scale": torch.ones(1)}),
    "gradient": (
        RuntimeError,
        "out_scale: got a tensor that requires a gradient",
        {"out_scale": torch.ones((), requires_grad=True)},
    ),
    "out": (RuntimeError, "out: got dtype torch.bfloat16", {"out": torch.ones(M, 40).bfloat16()}),
    "e5m2": (ValueError, "out_dtype: got torch.float8_e5m2", {"out_dtype": E5M2}),
    "x of 16 bits": (RuntimeError, "x: got dtype torch.bfloat16", {"x": torch.ones(M, K).bfloat16()}),
    "bias": (RuntimeError, "bias: got dtype torch.float16", {"bias": torch.ones(40).half()}),
    "strict": (RuntimeError, "strict: got True", {"strict": True}),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("function", [epigemm.linear_relu, epigemm.linear_glu], ids=["one product", "a pair"])
def test_errors(function: Any, name: str, rng: torch.Generator) -> None:
    error, text, other = ERRORS[name]
    if function is epigemm.linear_glu and "out" in other:
        other = {"out": other["out"][:, :20]}
    check_error(function, of_linear(rng, out_dtype=E4M3, out_scale=0.5), (error, text, other))


def test_eps_that_rounds_to_0(rng: torch.Generator) -> None:
    ones = torch.ones(40)
    with pytest.raises(RuntimeError, match="out_scale: got one with an eps that rounds to 0"):
        epigemm.linear_scale_batch_norm(**of_linear(rng, out_dtype=E4M3, out_scale=0.5), bias=None, scale=None,
                                        running_mean=ones, running_var=ones, eps=0.0)  # fmt: skip
