"""The fp32 products on fp16 slices, graded against float64 beside SGEMM and TF32: the promises of docs/numerics.md.

Of every tile, whether or not a call takes it: `OnSlices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import bounds, data, products, sweep
from benchmarks.gradings.measures import Exact, errors, ratios
from benchmarks.gradings.products import SCALED, SGEMM, SPLIT, TF32
from tests.gpu.launching import DEVICE
from tests.gpu.slices import DENSE, SIZE, assert_no_less_accurate, bound
from tests.support import exact, special

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

LARGE = [(m, n) for m in (1024, 16384) for n in (4096, 8192)]  # where dispatch takes our kernels if anywhere
OURS = {
    "split": products.forced(SPLIT),
    "highest": products.public("highest"),
    "scaled": products.forced(SCALED),
    "high": products.public("high"),
}

classes = pytest.mark.parametrize("name", [d.name for d in data.CLASSES])
all_k = pytest.mark.parametrize("k", sweep.KS)
full_precision = pytest.mark.parametrize("ours", [SPLIT, "highest"])
any_precision = pytest.mark.parametrize("ours", OURS)


def may_be_chosen(arithmetic: str, k: int) -> bool:
    """Whether dispatch takes the kernels for some M and N at this K: then their accuracy counts, whatever M and N."""
    return any(
        products.plan_of("bias_relu", m, n, k, arithmetic, packed=packed)["fused"]
        for m, n in LARGE
        for packed in (True, False)
    )


def test_the_main_shapes_take_the_kernels() -> None:
    """Otherwise every comparison below would be one of SGEMM with itself."""
    for m, n, k in [(1024, 8192, 8192), (16384, 4096, 4096)]:
        for epilogue in ("bias_relu", "sigmoid_scale_residual", "scale_batch_norm", "relu_div"):
            answer = products.plan_of(epilogue, m, n, k, SPLIT, packed=True)
            assert answer["fused"], answer["why_not"]
    assert may_be_chosen(SPLIT, 32768) and may_be_chosen(SPLIT, 2048) and not may_be_chosen(SPLIT, 1)


@classes
@all_k
def test_the_split_is_no_less_accurate_than_sgemm(name: str, k: int) -> None:
    """What users get at the default precision, for every K: where that is SGEMM itself, trivially so.

    By force wherever dispatch may choose it: at 1024 x 1024 it may find SGEMM faster than at the sizes it chooses.
    """
    found = {SGEMM: products.sgemm, SPLIT: OURS["highest"]}
    point = sweep.grade(found, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
    assert_no_less_accurate(point, SPLIT)
    assert point.errors[SPLIT].blas < 1
    if may_be_chosen(SPLIT, k):
        found[SPLIT] = OURS[SPLIT]
        point = sweep.grade(found, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
        assert_no_less_accurate(point, SPLIT)
        assert point.errors[SPLIT].blas < 1
    else:
        x, weight = data.BY_NAME[name].make(*SIZE, k, 0, DEVICE)
        worst = float(ratios(OURS[SPLIT](x, weight), Exact.of(x, weight)).max())
        assert worst <= bounds.split(k) / bounds.EPS


# Where SGEMM splits K, sums of few products and sums of one sign are more accurate there: measured 1.4 times in maxima
# and 1.39 in rms, of a few products with exponents in +-20 from K = 8192 on 2.61 and 1.54 (docs/numerics.md).
FEW_PRODUCTS, LONG_K = "wide_20", 8192
FEW_ROWS_LIMITS, LONG_K_LIMITS = (1.45, 1.45), (2.7, 1.6)


@pytest.mark.parametrize("name", [d.name for d in (*data.CLASSES, *data.EXTREME)])
@pytest.mark.parametrize("m", sweep.FEW_ROWS)
def test_few_rows(name: str, m: int) -> None:
    """Where dispatch takes the split beside a packed weight: how far from SGEMM, which splits K at few rows.

    The extreme classes keep the derived bound.
    """
    for n, k in sweep.LAYERS:
        point = sweep.grade_few_rows(data.BY_NAME[name], m, n, k, DEVICE)
        if point is None:
            continue
        ours = point.errors[SPLIT]
        assert ours.max_ratio <= bounds.split(k) / bounds.EPS and ours.blas < 1, (m, n, k, ours)
        largest, rms = point.times_baseline(SPLIT)
        if name in DENSE:
            assert largest <= sweep.NEARLY_EQUAL and rms <= sweep.NEARLY_EQUAL, (m, n, k, point.errors)
        elif name in [each.name for each in data.CLASSES]:
            limits = LONG_K_LIMITS if name == FEW_PRODUCTS and k >= LONG_K else FEW_ROWS_LIMITS
            assert largest <= limits[0] and rms <= limits[1], (m, n, k, point.errors)


def test_few_rows_take_the_split() -> None:
    """Otherwise the test above would compare nothing."""
    for m in sweep.FEW_ROWS:
        taken = [products.plan_of("bias", m, n, k, SPLIT, packed=True)["fused"] for n, k in sweep.LAYERS]
        assert any(taken) if m >= 16 else not any(taken), (m, taken)


@classes
@all_k
def test_the_scaled_product_is_no_less_accurate_than_tf32(name: str, k: int) -> None:
    """Through the public function at `high`, and by force wherever dispatch may choose it."""
    forced = [OURS[SCALED]] if may_be_chosen(SCALED, k) else []
    for ours in (OURS["high"], *forced):
        point = sweep.grade({TF32: products.tf32, SCALED: ours}, data.BY_NAME[name], k, 1, DEVICE)
        assert_no_less_accurate(point, SCALED)


@pytest.mark.parametrize("name", [d.name for d in data.EXTREME])
@all_k
def test_extreme_classes_keep_the_derived_bound(name: str, k: int) -> None:
    x, weight = data.BY_NAME[name].make(*SIZE, k, 0, DEVICE)
    found = errors(OURS[SPLIT](x, weight), Exact.of(x, weight))
    assert found.max_ratio <= bounds.split(k) / bounds.EPS and found.blas < 1


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_gradings_of_public_calls(precision: str) -> None:
    """Exact whole numbers and Demmel's; at `highest` adversarial data, too."""
    product = OURS[precision]
    verdicts = [*exact.integer_verdicts(product, DEVICE), *exact.demmel_verdicts(product, DEVICE)]
    if precision == "highest":
        verdicts += exact.representation_verdicts(product, DEVICE)
        verdicts += special.special_verdicts(product, DEVICE, special.EXACT_ENOUGH)
    for verdict in verdicts:
        assert verdict.ok, verdict
    # TF32 may answer at `high`, with TF32's range.
    either = max(bounds.scaled(special.K), 2.0**-9 + 2 * bounds.sgemm(special.K))
    for case in special.CASES if precision == "high" else ():
        assert special.misplaced_by_us(product, products.tf32, *case.make(DEVICE), either) == 0, case.name


PLANTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "NaN in the last row of x": lambda x, w: x[-1, -1].fill_(math.nan),
    "inf in the first row of the weight": lambda x, w: w[0, 0].fill_(math.inf),
    "-inf in a middle row of both": lambda x, w: (x[700, 5].fill_(-math.inf), w[1111, 5].fill_(-math.inf)),
    "inf against zeros": lambda x, w: (x[3, 8].fill_(math.inf), w[:, 8].zero_()),
    "a mask's largest number": lambda x, w: (x[3, 8].fill_(-special.LARGEST), w[:, 8].zero_()),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_special_values_in_a_large_public_call(plant: str, precision: str) -> None:
    """At a size where dispatch chooses our kernels, not by force."""
    m, n, k = 2048, 4096, 4096
    x, weight = data.BY_NAME["normal"].make(m, n, k, 0, DEVICE)
    PLANTS[plant](x, weight)
    if precision == "high":  # TF32 may answer, which one it is depends on the GPU; it has TF32's range
        either = max(bounds.scaled(k), 2.0**-9 + 2 * bounds.sgemm(k))
        assert special.misplaced_by_us(OURS[precision], products.tf32, x, weight, either) == 0
    else:
        assert products.plan_of("bias", m, n, k, SPLIT)["fused"]
        result = epigemm.linear(x, weight, precision=precision)
        assert special.misplaced(result, Exact.of(x, weight), bounds.split(k)) == 0


@pytest.mark.parametrize("arithmetic", [SPLIT, SCALED])
@pytest.mark.parametrize("is_range", [True, False], ids=["beyond the slices", "infinite"])
@pytest.mark.parametrize("operand", ["x", "weight"])
def test_trouble_in_one_tile_leaves_the_others_alone(arithmetic: str, is_range: bool, operand: str) -> None:
    product, draw = products.forced(arithmetic), data.Draw.seeded(5, DEVICE)
    x, weight = (draw.uniform(1024, 1024, 0.5, 2.0) * torch.sign(draw.normal(1024, 1024)) for _ in range(2))
    before = product(x, weight)
    spoiled = (x if operand == "x" else weight)[300]
    if is_range:  # nearly everything lies 2^40 below one element
        spoiled.mul_(2.0**-40)
    spoiled[0] = 1.0 if is_range else math.inf
    after = product(x, weight)
    old, new = (each if operand == "x" else each.t() for each in (before, after))
    assert not torch.equal(new[300], old[300])
    far = torch.ones(1024, dtype=torch.bool, device=DEVICE)
    far[256:512] = False  # no tile is larger than 256
    assert torch.equal(new[far], old[far]), "rows of other tiles changed"
    assert special.misplaced(after, Exact.of(x, weight), bound(arithmetic, 1024)) == 0


@full_precision
@pytest.mark.parametrize("k", [64, 1000, 8192])
@pytest.mark.parametrize("large_ones_meet_at", [(0, None), (0, 8), (-8, None)], ids=str)
def test_the_sum_of_magnitudes_decides_right(ours: str, k: int, large_ones_meet_at: tuple[int, ...]) -> None:
    """Tiny elements of x meet large ones of the weight; its large ones meet elements 2^gap smaller, or none."""
    draw = data.Draw.seeded(k, DEVICE)
    for gap in range(0, 44, 2):
        x, weight = (draw.uniform(rows, k, 0.5, 1.0) for rows in (300, 264))
        x[:, 1::2] *= 2.0**-30
        meeting = torch.zeros(k // 2, device=DEVICE)
        meeting[slice(*large_ones_meet_at)] = 2.0**-gap
        weight[:, : k // 2 * 2 : 2] *= meeting
        found = errors(OURS[ours](x, weight), Exact.of(x, weight))
        assert found.max_ratio <= bounds.split(k) / bounds.EPS, (gap, found)


@any_precision
@pytest.mark.parametrize("name", ["columns_60", "wide_20", "outlier_20"])
def test_repaired_results_repeat_bit_for_bit(ours: str, name: str) -> None:
    x, weight = data.BY_NAME[name].make(*SIZE, 1024, 0, DEVICE)
    x[77, 3], weight[1000, 9] = math.inf, math.nan
    first = OURS[ours](x, weight)
    for _ in range(5):
        assert torch.equal(OURS[ours](x, weight).view(torch.int32), first.view(torch.int32))
