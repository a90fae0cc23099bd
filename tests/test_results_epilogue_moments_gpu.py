"""Variances that follow from moments of a product's columns, on a GPU: in the product's kernel, and behind others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import epigemm
from epigemm import PerColumn, ResultsEpilogue
from epigemm.epilogues.tracing.results import VAR
from epigemm.linking import cubins
from tests.support.cases import fused_unavailable
from tests.support.moments import assert_close, poison_free_memory
from tests.support.results import assert_results, draw, left_to_pytorch, statistics, wanted
from tests.test_results_epilogue_moments import (
    FUNCTIONS,
    NAMES,
    alone,
    along_both,
    of_a_further_matrix,
    of_rows,
    of_the_product,
    sums,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
SIZES = [
    # M, N, K: one row, ragged blocks and tiles, rows that TMA does not store, few rows, many blocks
    (1, 136, 72),
    (3, 8, 64),
    (63, 200, 64),
    (129, 264, 136),
    (1001, 203, 131),
    (3333, 1032, 264),
    (4096, 2048, 1024),
    (40001, 256, 128),
]


@epigemm.epilogue
def beside_a_pair(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
    z = acc + bias
    y = F.gelu(z)
    return y, *torch.var_mean(z, 0), y.var(0, correction=0)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    return left_to_pytorch(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "function", [*FUNCTIONS, of_a_further_matrix, beside_a_pair], ids=[*NAMES, "further", "pair"]
)
def test_values_and_two_runs(
    function: ResultsEpilogue,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    left: list[tuple[str, int]],
    rng: torch.Generator,
) -> None:
    m, n, k = size
    given = draw(function, rng, dtype, DEVICE, (m,), n, k)
    want = wanted(function, given.product, given.operands)
    runs = []
    for _ in range(2):
        poison_free_memory(DEVICE, 1 + (m * n >> 18))
        runs.append(function(given.x, given.weight, *given.operands))
        assert_results(function, runs[-1], want, dtype, (m, n))
    for one, other in zip(*map(tree_leaves, runs), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    # In 16 bits a sum that is not returned is made of the product: PyTorch reduces it.
    is_apart = function is beside_a_pair and dtype in HALVES
    assert m == 1 or is_apart or (VAR, 0) not in left


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_they_are_those_of_the_stored_numbers(
    offset: float, size: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Also where the mean is 1e4 times the deviation, as far as 16 bits hold it."""
    m, n, k = size
    given = draw(statistics, rng, dtype, DEVICE, (m,), n, k)
    bias, scale = given.operands
    bias += offset
    scale.fill_(1.0)
    for function, operands in ((statistics, given.operands), (of_the_product, [])):
        z, *found = tree_leaves(function(given.x, given.weight, *operands))
        variance, mean = found[:2]
        assert_close(z, mean, variance)
        if function is of_the_product and m > 3:
            for other, correction in ((found[2], 2.5), (found[3].flatten(), 1.0)):
                torch.testing.assert_close(other, variance * (m / (m - correction)), rtol=2**-22, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (2049, 2041, 512), (4097, 4104, 256)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_sums_means_and_variances_of_both_axes(
    offset: float,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    left: list[tuple[str, int]],
    rng: torch.Generator,
) -> None:
    """As accurate as the moments (tests.support.moments), of operands with gaps between their rows, in two runs.

    The bound of a sum is that of a mean times the count. What is left to PyTorch has its accuracy.
    """
    m, n, k = size
    given = draw(along_both, rng, dtype, DEVICE, (m,), n, k)
    (bias,) = given.operands
    bias += offset
    x, weight = (
        torch.full((each.shape[0], each.shape[1] + 24), 7.0, device=DEVICE, dtype=dtype)[:, 8 : 8 + k]
        for each in (given.x, given.weight)
    )
    x.copy_(given.x)
    weight.copy_(given.weight)
    runs = []
    for _ in range(2):
        poison_free_memory(DEVICE, 1 + (m * n >> 18))
        runs.append(tree_leaves(along_both(x, weight, bias)))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    z, sum0, mean0, var0, sum1, mean1, var1, _, corrected = runs[0]
    assert_close(z, mean0.flatten(), var0)
    assert not left or [axis for _, axis in left] == [1] * len(left)
    if (VAR, 1) not in left:
        assert_close(z.t(), mean1, var1 * ((n - 1) / n))
    for total, matrix in ((sum0, z.double()), (sum1, z.double().t())):
        if total is sum1 and left:
            continue
        largest = (matrix - matrix.mean(0)).abs().amax(0)
        epsilon = torch.finfo(torch.float32).eps
        bound = len(matrix) * (2 * epsilon * matrix.mean(0).abs() + 16 * epsilon * largest)
        assert ((total.double() - matrix.sum(0)).abs() <= bound).all()
    if not left:
        torch.testing.assert_close(corrected.flatten(), var1 * ((n - 1) / (n - 2.5)), rtol=2**-21, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 64, 64), (1000, 200, 64), (4096, 2048, 1024)], ids=str)
def test_sums_are_infinite_where_pytorchs_are(
    size: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    m, n, k = size
    given = draw(sums, rng, dtype, DEVICE, (m,), n, k)
    bias, inf = given.operands[0], float("inf")
    bias[0], bias[n // 2], bias[n - 1] = inf, -inf, float("nan")
    z, *found = sums(given.x, given.weight, bias)
    of_rows_alone = of_rows(given.x, given.weight)
    wide = z.double()
    for each, want in zip(found, (wide.sum(0), wide.mean(0), wide.amax(0), wide.sum(1)), strict=True):
        special = ~want.isfinite()
        assert torch.equal(each[special].double().nan_to_num(7.0), want[special].nan_to_num(7.0))
        assert bool(each[~special].isfinite().all())
    assert all(bool(each.isfinite().all()) for each in tree_leaves(of_rows_alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_columns(dtype: torch.dtype) -> None:
    """Their variance is 0, and their mean is the number itself."""
    x = torch.ones(1000, 64, device=DEVICE, dtype=dtype)
    weight = torch.zeros(256, 64, device=DEVICE, dtype=dtype)
    weight[:, 5] = torch.linspace(-3e4, 3e4, 256, device=DEVICE)
    variance, mean = alone(x, weight)
    assert not variance.any() and torch.equal(mean, weight[:, 5].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 64, 64), (1000, 200, 64), (4096, 2048, 1024)], ids=str)
def test_infinities_and_nans_stay_in_their_columns(
    size: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    m, n, k = size
    given = draw(alone, rng, dtype, DEVICE, (m,), n, k)
    want = alone(given.x, given.weight)
    for place, number in enumerate((float("inf"), float("-inf"), float("nan"))):
        given.weight[3 + 7 * place, 1] = number
    variance, mean = alone(given.x, given.weight)
    hit = given.weight[:, 1].isfinite().logical_not()
    assert bool(variance[hit].isnan().all()) and not mean[hit].isfinite().any()
    for found, other in zip((variance, mean), want, strict=True):
        if dtype is torch.float32:  # the fixup reduces again the blocks of what it computes again
            torch.testing.assert_close(found[~hit], other[~hit], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found[~hit], other[~hit])


def test_one_infinity_in_a_column(rng: torch.Generator) -> None:
    for row in (0, 1, 63, 64, 700, 999):
        z = torch.randn(1000, 40, generator=rng).to(DEVICE, torch.float16)
        z[row, 5] = float("inf")
        variance, mean = alone.elementwise(z)
        assert variance.isnan().nonzero().tolist() == [[5]] and not mean[5].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_hopper_the_products_kernel_reduces(dtype: torch.dtype, rng: torch.Generator) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for function in (statistics, alone, along_both, of_rows, sums):
        given = draw(function, rng, dtype, DEVICE, (4096,), 2048, 1024)
        found = epigemm.explain(function, given.x, given.weight, *given.operands, strict=True)
        assert found.path == "fused" and not any("blocks of rows" in each for each in found.kernels)
        assert any("the product's kernel reduces the blocks of" in each for each in found.reasons)
        if function in (along_both, of_rows):
            assert not any("torch sum" in each or "var_mean" in each for each in found.kernels)
        got = function(given.x, given.weight, *given.operands, strict=True)
        assert_results(function, got, wanted(function, given.product, given.operands), dtype, (4096, 2048))


def test_precompiled_calls_link_nothing(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a call had to link")

    sizes = [(16, 1024, 1024), (512, 1024, 1024), (2048, 1024, 1024)]
    epigemm.precompile(statistics, sizes)
    monkeypatch.setattr(cubins, "build_cubins", refuse)
    for m, n, k in sizes:
        given = draw(statistics, rng, torch.bfloat16, DEVICE, (m,), n, k)
        statistics(given.x, given.weight, *given.operands)


def test_where_gradients_autocast_and_graphs_are(rng: torch.Generator, left: list[tuple[str, int]]) -> None:
    given = draw(alone, rng, torch.float32, DEVICE, (1000,), 256, 128)
    want = wanted(alone, given.product, given.operands)
    with torch.autocast("cuda", torch.bfloat16):
        got = alone(given.x, given.weight, *given.operands)
    assert_results(alone, got, want, torch.bfloat16, (1000, 256))
    assert not left
    given = draw(alone, rng, torch.bfloat16, DEVICE, (1000,), 256, 128)
    want = alone(given.x, given.weight, *given.operands)
    with torch.inference_mode():
        assert all(
            torch.equal(one, other)
            for one, other in zip(alone(given.x, given.weight, *given.operands), want, strict=True)
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = alone(given.x, given.weight, *given.operands)
    for each in got:
        each.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)) and not left
    leaves = given.leaves()
    variance, mean = alone(given.x, given.weight, *given.operands)
    (variance.sum() + mean.sum()).backward()
    assert all(each.grad is not None for each in leaves) and left == [(VAR, 0)]
    torch.testing.assert_close([variance.detach(), mean.detach()], list(want), rtol=1e-2, atol=1e-2)
