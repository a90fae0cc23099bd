"""The fp32 products on fp16 slices, graded against float64 beside SGEMM and TF32: the promises of docs/numerics.md."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings import bounds, data, products, sweep
from benchmarks.gradings.measures import Exact, errors, ratios
from benchmarks.gradings.products import SCALED, SGEMM, SPLIT, TF32, Product
from tests.support import exact, special
from tests.support.split import every_tile, plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
SIZE = (sweep.ROWS, sweep.COLUMNS)
LARGE = [(m, n) for m in (1024, 16384) for n in (4096, 8192)]  # where dispatch takes our kernels if anywhere
OURS = {
    "split": products.forced(SPLIT),
    "highest": products.public("highest"),
    "scaled": products.forced(SCALED),
    "high": products.public("high"),
}
FULL = [SPLIT, "highest"]

classes = pytest.mark.parametrize("name", [d.name for d in data.CLASSES])
all_k = pytest.mark.parametrize("k", sweep.KS)
full_precision = pytest.mark.parametrize("ours", FULL)
any_precision = pytest.mark.parametrize("ours", OURS)


def may_be_chosen(arithmetic: str, k: int) -> bool:
    """Whether dispatch takes the kernels for some M and N at this K: then their accuracy counts, whatever M and N."""
    return any(
        products.plan_of("bias_relu", m, n, k, arithmetic, packed=packed)["fused"]
        for m, n in LARGE
        for packed in (True, False)
    )


def assert_no_less_accurate(point: sweep.Point, arithmetic: str) -> None:
    times = point.times_baseline(arithmetic)
    ours, baseline = point.errors[arithmetic], point.errors[products.BASELINE[arithmetic]]
    assert point.as_accurate(arithmetic), (
        f"{point.data}, K = {point.k}: max and rms are {times[0]:.3f} and {times[1]:.3f} of "
        f"{products.BASELINE[arithmetic]}'s ({ours} against {baseline})"
    )


def test_the_main_shapes_take_the_kernels() -> None:
    """Otherwise every comparison below would be one of SGEMM with itself."""
    for m, n, k in [(1024, 8192, 8192), (16384, 4096, 4096)]:
        for epilogue in ("bias_relu", "sigmoid_scale_residual", "scale_batch_norm", "relu_div"):
            answer = products.plan_of(epilogue, m, n, k, SPLIT, packed=True)
            assert answer["fused"], answer["why_not"]
    assert may_be_chosen(SPLIT, 32768) and not may_be_chosen(SPLIT, 1)


@classes
@all_k
def test_public_results_are_no_less_accurate_than_sgemm(name: str, k: int) -> None:
    """What users get at the default precision, for every K: where that is SGEMM itself, trivially so."""
    found = {SGEMM: products.sgemm, SPLIT: OURS["highest"]}
    point = sweep.grade(found, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
    assert_no_less_accurate(point, SPLIT)
    assert point.errors[SPLIT].blas < 1


# Sums of many products that count. In the others few do, and 22 bits of each are less than 24.
DENSE = ["uniform_linear", "normal", "rows_8", "rows_30", "rows_60"]
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
def test_the_split_is_no_less_accurate_than_sgemm_where_it_may_be_chosen(name: str, k: int) -> None:
    """By force, because at 1024 x 1024 dispatch may find SGEMM faster than at the sizes it chooses the split for."""
    if not may_be_chosen(SPLIT, k):
        relative = bounds.split(k) / bounds.EPS
        x, weight = data.BY_NAME[name].make(*SIZE, k, 0, DEVICE)
        assert float(ratios(OURS[SPLIT](x, weight), Exact.of(x, weight)).max()) <= relative
        return
    found = {SGEMM: products.sgemm, SPLIT: OURS[SPLIT]}
    point = sweep.grade(found, data.BY_NAME[name], k, sweep.seeds_for(k), DEVICE)
    assert_no_less_accurate(point, SPLIT)
    assert point.errors[SPLIT].blas < 1


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


@pytest.mark.parametrize(("arithmetic", "tile"), every_tile(), ids=lambda v: getattr(v, "name", str(v)))
@pytest.mark.parametrize("name", ["uniform_linear", "positive", "columns_30"])
def test_every_tile_is_as_accurate(arithmetic: object, tile: int, name: str) -> None:
    """Tiles differ in how they accumulate and promote."""
    kind = str(getattr(arithmetic, "name", arithmetic))
    if kind == SPLIT and not may_be_chosen(SPLIT, 2048):
        pytest.fail("dispatch takes the split nowhere at K = 2048")
    graded = {"sgemm": products.sgemm, "tf32": products.tf32, kind: products.forced(kind, plan(tile))}
    assert_no_less_accurate(sweep.grade(graded, data.BY_NAME[name], 2048, 2, DEVICE), kind)


@any_precision
def test_integers_are_exact(ours: str) -> None:
    for verdict in exact.integer_verdicts(OURS[ours], DEVICE):
        assert verdict.ok, verdict


@any_precision
def test_demmel(ours: str) -> None:
    """Exact zeros and the circulant test up to 2^+-50: beyond the range of two pieces the guard must act."""
    for verdict in exact.demmel_verdicts(OURS[ours], DEVICE):
        assert verdict.ok, verdict


@full_precision
def test_adversarial_representation(ours: str) -> None:
    for verdict in exact.representation_verdicts(OURS[ours], DEVICE):
        assert verdict.ok, verdict


def relative_bound(ours: str) -> float:
    if ours in FULL:
        return special.EXACT_ENOUGH
    return max(bounds.scaled(special.K), 2.0**-9 + 2 * bounds.sgemm(special.K))  # TF32 may answer at `high`


@any_precision
@pytest.mark.parametrize("case", special.CASES, ids=lambda case: case.name)
def test_special_values(ours: str, case: special.Special) -> None:
    if ours == products.PRECISION[SCALED]:  # TF32 may answer, with TF32's range
        wrong = special.misplaced_by_us(OURS[ours], products.tf32, *case.make(DEVICE), relative_bound(ours))
    else:
        x, weight = case.make(DEVICE)
        wrong = special.misplaced(OURS[ours](x, weight), Exact.of(x, weight), relative_bound(ours))
    assert wrong == 0, f"{wrong} of {special.M * special.N} entries"


@pytest.mark.parametrize(("arithmetic", "tile"), every_tile(), ids=lambda v: getattr(v, "name", str(v)))
def test_special_values_in_every_tile(arithmetic: object, tile: int) -> None:
    kind = str(getattr(arithmetic, "name", arithmetic))
    product = products.forced(kind, plan(tile, raster=1))
    for verdict in special.special_verdicts(product, DEVICE, relative_bound(kind)):
        assert verdict.ok, verdict


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
        bound = max(bounds.scaled(k), 2.0**-9 + 2 * bounds.sgemm(k))
        assert special.misplaced_by_us(OURS[precision], products.tf32, x, weight, bound) == 0
    else:
        assert products.plan_of("bias", m, n, k, SPLIT)["fused"]
        result = epigemm.linear(x, weight, precision=precision)
        assert special.misplaced(result, Exact.of(x, weight), bounds.split(k)) == 0


def without_trouble(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    draw = data.Draw.seeded(5, DEVICE)
    x, weight = draw.uniform(m, k, 0.5, 2.0), draw.uniform(n, k, 0.5, 2.0)
    return x * torch.sign(draw.normal(m, k)), weight * torch.sign(draw.normal(n, k))


def spoil_range(row: Tensor) -> None:
    """A row that its pieces cannot hold: nearly everything lies 2^40 below one element."""
    row.mul_(2.0**-40)
    row[0] = 1.0


def spoil_infinite(row: Tensor) -> None:
    row[0] = math.inf


@pytest.mark.parametrize("arithmetic", [SPLIT, SCALED])
@pytest.mark.parametrize("spoil", [spoil_range, spoil_infinite])
@pytest.mark.parametrize("operand", ["x", "weight"])
def test_trouble_in_one_tile_leaves_the_others_alone(
    arithmetic: str, spoil: Callable[[Tensor], None], operand: str
) -> None:
    product = products.forced(arithmetic)
    x, weight = without_trouble(1024, 1024, 1024)
    before = product(x, weight)
    row = 300
    spoil((x if operand == "x" else weight)[row])
    after = product(x, weight)
    line = after[row] if operand == "x" else after[:, row]
    old = before[row] if operand == "x" else before[:, row]
    assert not torch.equal(line, old)
    far = torch.ones(1024, dtype=torch.bool, device=DEVICE)
    far[256:512] = False  # no tile is larger than 256
    kept = (after[far], before[far]) if operand == "x" else (after[:, far], before[:, far])
    assert torch.equal(*kept), "rows of other tiles changed"
    bound = bounds.split(1024) if arithmetic == SPLIT else bounds.scaled(1024)
    assert special.misplaced(after, Exact.of(x, weight), bound) == 0


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


def test_a_power_of_two_scales_the_result_exactly() -> None:
    """Scales are powers of two throughout: rows of x times 2^e give rows of the same bits, times 2^e."""
    x, weight = data.BY_NAME["uniform_linear"].make(*SIZE, 2048, 0, DEVICE)
    exponents = data.Draw.seeded(1, DEVICE).exponents(SIZE[0], 1, 40)
    product: Product = OURS[SPLIT]
    assert torch.equal(product(torch.ldexp(x, exponents), weight), torch.ldexp(product(x, weight), exponents))
