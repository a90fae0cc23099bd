"""Scales of blocks, 1x128 of x and 128x128 of the weight, against float64 of the dequantised inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigemm
from epigemm.arguments import eight_bits
from epigemm.arguments.calls import EightBits, LinearCall
from epigemm.calls import eight_bits as by_torch
from epigemm.epilogues.library import BIAS
from tests.ops.eight_bits import (
    BF16,
    BLOCK,
    E4M3,
    E5M2,
    FP32,
    HALF,
    Case,
    called,
    check_compiled_and_exported,
    check_error,
    check_operators,
    check_quantised,
    check_vmap,
    close,
    in_blocks,
    same,
    scaled,
    takes_8_bits,
    variant,
    widen,
)
from tests.ops.op import Arguments, Op, wide
from tests.ops.table import few, rows

M, N, K = 9, 208, 272  # two blocks of K and a part of one, a block of N and a part of one


def count(length: int) -> int:
    """Of blocks."""
    return math.ceil(length / BLOCK)


def meant(tensor: Tensor, scales: Tensor, height: int) -> Tensor:
    """A matrix times its scales, in float64."""
    every = scales.double().repeat_interleave(BLOCK, 1)[:, : tensor.shape[1]]
    return tensor.double() * every.repeat_interleave(height, 0)[: len(tensor)]


def of_linear(
    rng: torch.Generator, m: int = M, n: int = N, k: int = K, *, is_turned: bool = True, **other: Any
) -> Arguments:
    """Arguments of `linear`. `is_turned`: the scales of a block of x lie side by side, as torch has them."""
    x, weight = torch.randn(m, k, generator=rng).to(E4M3), torch.randn(n, k, generator=rng).to(E4M3)
    of_x, of_weight = scaled((count(k), m), rng).t(), scaled((count(k), count(n)), rng).t()
    if not is_turned:
        of_x, of_weight = of_x.contiguous(), of_weight.contiguous()
    return {"x": x, "weight": weight, "x_scale": of_x, "weight_scale": of_weight, **other}


def product(given: Arguments) -> Tensor:
    """In float64."""
    x, weight = (
        meant(given[each], given[f"{each}_scale"], height) for each, height in (("x", 1), ("weight", BLOCK))
    )
    return x @ weight.t()


def drawn(
    op: Op, rng: torch.Generator, dtype: torch.dtype = BF16, *, is_turned: bool = True, **options: Any
) -> tuple[Arguments, Arguments]:
    """Arguments of a function, and those of the reference: fp64, the scales in x and the weight."""
    given = op.draw(rng, (M,), N, K, dtype=dtype, **options)
    reference = wide(given)
    given |= of_linear(rng, is_turned=is_turned)
    given["weight"] = (given["weight"].float() / 8).to(E4M3)
    reference["x"] = meant(given["x"], given["x_scale"], 1)
    reference["weight"] = meant(given["weight"], given["weight_scale"], BLOCK)
    return given | {"out_dtype": dtype}, reference


@rows("eight_bit_blocks_values", takes_8_bits)
def test_values(op: Op, rng: torch.Generator) -> None:
    """Every type of results, scales in both orders, fp32 operands, `out`."""
    for number, (dtype, is_turned) in enumerate(itertools.product((BF16, HALF, FP32), (True, False))):
        given, reference = drawn(op, rng, dtype, is_turned=is_turned, **variant(op, number))
        if number % 3 == 0:
            widen(op, given)
        result = called(op, given)
        assert result.dtype is dtype and result.shape == (M, N)
        close(result, op.reference(**reference))


@rows("eight_bit_blocks_results", takes_8_bits)
def test_results_of_8_bits(op: Op, rng: torch.Generator) -> None:
    given, reference = drawn(op, rng)
    result = op.call(**given | {"out_dtype": E4M3, "out_scale": 0.03})
    check_quantised(result, op.reference(**reference), 0.03)
    found = op.call(**given | {"out_dtype": E4M3, "out_scale": "1x128"})
    assert same(found, in_blocks(op.call(**given)))


SIZES = [
    (1, 1, 16), (3, 128, 128), (7, 129, 144), (2, 40, 1040), (4, 3, 384),
    (5, 64, 64 * BLOCK),  # as many blocks of K as rows of the weight
    (6, 300, 48), (33, 16, 256), (0, 40, 272), (3, 0, 272), (3, 40, 0),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, int, int], rng: torch.Generator) -> None:
    """Ragged ones, one block and none."""
    given = of_linear(rng, *sizes, out_dtype=FP32, bias=scaled(sizes[1:2], rng))
    result, expected = epigemm.linear(**given), product(given) + given["bias"].double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_axes(lead: tuple[int, ...], rng: torch.Generator) -> None:
    """x's rows may have several axes, and so may their scales, or one."""
    given = of_linear(rng, math.prod(lead))
    expected = product(given).reshape(*lead, N)
    for shape in ((*lead, 3), (math.prod(lead), 3)):
        several = {"x": given["x"].reshape(*lead, K), "x_scale": given["x_scale"].reshape(shape)}
        close(epigemm.linear(**given | several), expected)


def test_the_next_layer(rng: torch.Generator) -> None:
    """It takes a result in blocks, and their scales, as they are."""
    given = of_linear(rng, out_dtype=E4M3, out_scale="1x128")
    given["x"], given["x_scale"] = given["x"].expand(2, M, K), given["x_scale"].expand(2, M, 3)
    x, x_scale = epigemm.linear_relu(**given)
    following = of_linear(rng, 2 * M, 40, N) | {"x": x, "x_scale": x_scale}
    flat = {"x": x.view(2 * M, N), "x_scale": x_scale.reshape(2 * M, 2)}
    close(epigemm.linear(**following), product(following | flat).view(2, M, 40))


@pytest.mark.parametrize("value", [float("inf"), 0.0, float("nan")], ids=str)
def test_special_scales(value: float, rng: torch.Generator) -> None:
    """They multiply the sums of a block, which decide what an infinity makes of them, and not its numbers."""
    given = of_linear(rng, out_dtype=FP32)
    given["x_scale"][3, 1] = value
    given["x"][3, BLOCK : 2 * BLOCK] = given["x"][3, BLOCK : 2 * BLOCK].float().clamp(min=0).to(E4M3)
    expected = torch.zeros(M, N, dtype=torch.float64)
    for block in range(3):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        sums = given["x"][:, part].double() @ given["weight"][:, part].double().t()
        of_columns = given["weight_scale"][:, block].double().repeat_interleave(BLOCK)[:N]
        expected += sums * given["x_scale"][:, block, None].double() * of_columns
    found = epigemm.linear(**given).double()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("half", "is_one"), [(256, True), (256, False), (200, False), (40, False)], ids=str)
def test_pairs(half: int, is_one: bool, activation: str, rng: torch.Generator) -> None:
    """The first weight's blocks come first; a weight with the rows of both has whole blocks of each."""
    given, other = of_linear(rng, n=half), of_linear(rng, n=half)
    first, second = (
        product(given),
        product(given | {"weight": other["weight"], "weight_scale": other["weight_scale"]}),
    )
    expected = getattr(F, activation)(first) * second
    scales = torch.cat([given["weight_scale"], other["weight_scale"]])
    given |= {"weight_scale": scales, "activation": activation}
    if is_one:
        given["weight"] = torch.cat([each["weight"].float() for each in (given, other)]).to(E4M3)
    else:
        given["weight2"] = other["weight"]
    for dtype in (BF16, HALF, FP32):
        given["out_dtype"] = dtype
        result = epigemm.linear_glu(**given)
        assert result.dtype is dtype
        torch.testing.assert_close(
            result.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 * float(first.abs().max()),
            check_dtype=False,
        )  # fmt: skip
    options = {"out_dtype": E4M3, "out_scale": "1x128"}
    y = epigemm.linear_glu(**given | {"out_dtype": BF16})
    assert same(epigemm.linear_glu(**given | options), in_blocks(y))


def test_batch_invariance(rng: torch.Generator) -> None:
    given = of_linear(rng, out_dtype=E4M3, out_scale="1x128")
    one = {name: given[name][4:5] for name in ("x", "x_scale")}
    with epigemm.batch_invariant():
        whole, row = epigemm.linear_silu(**given), epigemm.linear_silu(**given | one)
    assert all(same(every[4:5], each) for every, each in zip(whole, row, strict=True))


@pytest.mark.parametrize("options", [{}, {"out_dtype": E4M3, "out_scale": "1x128"}], ids=["bf16", "blocks"])
def test_vmap(options: Arguments, rng: torch.Generator) -> None:
    check_vmap(of_linear(rng, **options), scaled((3, M, 3), rng))


def test_compiled_for_any_sizes(rng: torch.Generator) -> None:
    compiled = torch.compile(epigemm.linear_silu, fullgraph=True, dynamic=True, backend="aot_eager")
    for lead in ((2, 3), (3, 3), (4, 5)):
        given = of_linear(rng, math.prod(lead))
        given |= {"x": given["x"].view(*lead, K), "x_scale": given["x_scale"].reshape(*lead, 3)}
        assert torch.equal(compiled(**given), epigemm.linear_silu(**given))


@pytest.mark.parametrize("options", [{}, {"out_dtype": E4M3, "out_scale": "1x128"}], ids=["bf16", "blocks"])
@rows("eight_bit_blocks_compiled", lambda op: takes_8_bits(op) and few(op) and op.is_exported)
def test_compiled_and_exported(op: Op, options: Arguments, rng: torch.Generator) -> None:
    given = drawn(op, rng)[0] | options
    check_compiled_and_exported(op, given)


def test_the_operators(rng: torch.Generator) -> None:
    check_operators(of_linear(rng), scaled((N,), rng).bfloat16(), "promoted", {"out_dtype": BF16})


def test_explain(rng: torch.Generator) -> None:
    found = epigemm.explain(epigemm.linear_gelu, **of_linear(rng))
    assert found.path == "reference" and found.arithmetic == "ieee float32"
    assert "of each 128 columns" in found.kernels[0] and "in fp32" in found.kernels[0]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=str)
def test_what_torch_multiplies(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel of ours does: on Hopper sizes that cuBLAS takes, of which torch's own checks accept each."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    taken = set()
    with FakeTensorMode():
        for m, n, k in itertools.product(
            (1, 4, 6, 256), (8, 16, 208, 512), (16, 128, 272, 512, 640, 1040, 1536)
        ):
            x, weight = (torch.empty(each, k, dtype=E4M3, device="cuda") for each in (m, n))
            scales = (
                torch.empty(count(k), m, device="cuda").t(),
                torch.empty(count(n), count(k), device="cuda"),
            )
            about = eight_bits.checked(x, weight, EightBits(*scales))
            call = LinearCall(BIAS, x, weight, precision="promoted", eight_bits=about)
            if by_torch.runs_scaled_mm(call):
                result = by_torch.of_call(call, lambda call: call.x)
                assert result.shape == (m, n) and result.dtype is BF16
                taken.add((m, n, k))
    hopper = itertools.product((4, 256), (16, 208, 512), (512, 1536))
    assert taken == (set(hopper) if capability == (9, 0) else set())


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


PAIRS = "accepted are scales of blocks of both, [9, 3] with [2, 3], or of none: [] or [9] with [] or [208]"
ERRORS: dict[str, Case] = {
    "fast": (ValueError, "accumulate: got 'fast' with scales of blocks; accepted", {"accumulate": "fast"}),
    "e5m2 x": (RuntimeError, "x: got dtype torch.float8_e5m2 with scales of blocks", {"x": ones(M, K).to(E5M2)}),
    "e5m2": (RuntimeError, "weight: got dtype torch.float8_e5m2 with scales of", {"weight": ones(N, K).to(E5M2)}),
    "beside rows": (RuntimeError, f"got shape [208] beside an x_scale of [9, 3]; {PAIRS}", {"weight_scale": ones(N)}),
    "beside torch's rows": (RuntimeError, PAIRS, {"weight_scale": ones(1, N)}),
    "beside a tensor": (RuntimeError, PAIRS, {"weight_scale": ones()}),
    "rows beside": (RuntimeError, PAIRS, {"x_scale": ones(M)}),
    "torch's rows beside": (RuntimeError, PAIRS, {"x_scale": ones(M, 1)}),
    "a tensor beside": (RuntimeError, PAIRS, {"x_scale": ones()}),
    "columns of x": (RuntimeError, "x_scale: got shape [9, 2]; accepted is [] or [9]", {"x_scale": ones(M, 2)}),
    "rows of x": (RuntimeError, "x_scale: got shape [8, 3]", {"x_scale": ones(M - 1, 3)}),
    "another order": (RuntimeError, "x_scale: got shape [3, 9]", {"x_scale": ones(3, M)}),
    "columns": (RuntimeError, "weight_scale: got shape [2, 2]; accepted is [] or [208]", {"weight_scale": ones(2, 2)}),
    "torch's order": (RuntimeError, "or [2, 3] of blocks", {"weight_scale": ones(3, 2)}),
    "1x128": (RuntimeError, "weight_scale: got shape [208, 3]", {"weight_scale": ones(N, 3)}),
    "dtype": (RuntimeError, "x_scale: got dtype torch.bfloat16", {"x_scale": ones(M, 3).bfloat16()}),
    "device": (RuntimeError, "weight_scale: got device meta", {"weight_scale": ones(2, 3).to("meta")}),
    "gradient": (RuntimeError, "x_scale: got a tensor that requires", {"x_scale": ones(M, 3).requires_grad_()}),
    "out": (RuntimeError, "out: got dtype torch.float32", {"out": ones(M, N)}),
    "strict": (RuntimeError, "strict: got True", {"strict": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, rng: torch.Generator) -> None:
    check_error(epigemm.linear_relu, of_linear(rng), ERRORS[name])


OF_PAIRS: dict[str, Case] = {
    "parts of blocks": (RuntimeError, "weight: got 208 rows for each product with scales of blocks; accepted are",
                        {"weight": ones(2 * N, K).to(E4M3), "weight_scale": ones(4, 3)}),
    "a part of one": (RuntimeError, "weight: got 104 rows for each product", {"weight_scale": ones(2, 3)}),
    "blocks of one": (RuntimeError, "weight_scale: got shape [2, 3]; accepted is [] or [416] or [1, 416]",
                      {"weight2": ones(N, K).to(E4M3), "weight_scale": ones(2, 3)}),
    "fast": (ValueError, "accumulate: got 'fast' with scales of blocks",
             {"weight2": ones(N, K).to(E4M3), "weight_scale": ones(4, 3), "accumulate": "fast"}),
    "strict": (RuntimeError, "strict: got True",
               {"weight2": ones(N, K).to(E4M3), "weight_scale": ones(4, 3), "strict": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PAIRS)
def test_errors_of_pairs(name: str, rng: torch.Generator) -> None:
    check_error(epigemm.linear_glu, of_linear(rng), OF_PAIRS[name])
