"""The planner and the mma.sync kernels, for described GPUs: by assumed costs a fused plan has to win by a tenth."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gemm.query import H200, Query
from tests.support import plans
from tools.mma_choices import FP32, GPUS, MULTIPLIED, SHAPES, Choice, choices, table

AMPERE = list(GPUS.values())
LARGE = Query(m=8192, n=8192, k=8192, gpu=GPUS["A100 40 GB"])
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KB of a CTA


def shared_kb(tile: str) -> float:
    """Of the stages, of which wide ones have three and the others at most four: at least so much."""
    m, n, k = map(int, tile.split("x"))
    return (3 if k == 64 else 2) * 2 * k * (m + n) / 1024


LEAST_RATIO = 1.099  # a tenth; times have six digits


@pytest.mark.parametrize("gpu", AMPERE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_fused_plan_must_win_by_a_tenth(gpu: tuple[int, ...], dtype: str) -> None:
    is_tf32 = dtype == "float32"
    ratios = []
    for m, n, k in SHAPES[::2]:
        query = Query(m=m, n=n, k=k, gpu=gpu, dtype=dtype, tf32_allowed=is_tf32)
        found = replace(query, arithmetic="tf32" if is_tf32 else "ieee").plan()
        assert {each["family"] for each in found["candidates"]} <= {plans.MMA}
        assert all(each["shared_bytes"] <= 1024 * SHARED[gpu[0]] for each in found["candidates"])
        if found["fused"]:
            ratios.append(found["fallback_us"] / found["predicted_us"])
        else:
            assert "expected to be" in found["why_not"] or found["candidates"] == []
    assert ratios and min(ratios) >= LEAST_RATIO


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_hopper_rows_that_tma_refuses_are_offered_them(dtype: str) -> None:
    """Those alone: elsewhere the kernels that load by TMA are faster."""
    for m, n, k in SHAPES[::5]:
        candidates = Query(m=m, n=n, k=k, gpu=H200, dtype=dtype).plan()["candidates"]
        mine = [each for each in candidates if each["family"] == plans.MMA]
        assert mine == (candidates if n % 8 or k % 8 else [])
        assert candidates and all(each["schedule"] == "by elements" for each in mine)


@pytest.mark.parametrize(
    "query", [replace(LARGE, k=8191), replace(LARGE, n=8191), Query(k=8191), Query(n=8191)], ids=str
)
def test_no_batch_invariant_call_loads_by_elements(query: Query) -> None:
    """PyTorch's GEMM takes a seventh of the time at this size."""
    found = replace(query, invariant=True).plan()
    assert not found["fused"] and found["candidates"] == []


def test_other_batch_invariant_calls_take_one_tile() -> None:
    for m in (1, 100, 8192):
        found = replace(LARGE, m=m, invariant=True).plan()
        assert found["fused"] and [each["tile"] for each in found["candidates"]] == ["128x128x32"]


def asked(query: Query) -> dict[str, Any]:
    return replace(query, any_family=True).plan()


@pytest.mark.parametrize("gpu", [*AMPERE, H200])
@pytest.mark.parametrize("sizes", [(1, 8, 8), (16, 4096, 4096), (777, 1000, 520), (8192, 8192, 8192)])
def test_every_candidate_fits_its_gpu(gpu: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    found = asked(Query(m=m, n=n, k=k, gpu=gpu))
    mine = [each for each in found["candidates"] if each["family"] == plans.MMA]
    assert mine and all(each["schedule"] == "multistage" for each in mine)
    assert all(shared_kb(each["tile"]) <= SHARED[gpu[0]] for each in mine)
    assert all(each["predicted_us"] > 0 for each in mine)
    has_wide = any(each["tile"] in ("128x256x64", "256x128x64") for each in mine)
    assert has_wide == (SHARED[gpu[0]] > 144)


@pytest.mark.parametrize(
    "changed", [{"k": 8191}, {"n": 8191}, {"alignment": 2}, {"alignment": 8}, {"x_row_stride": 8193}]
)
def test_rows_that_are_no_whole_vectors_are_read_by_elements(changed: dict[str, Any]) -> None:
    found = asked(replace(LARGE, **changed))
    assert {each["schedule"] for each in found["candidates"]} == {"by elements"}


@pytest.mark.parametrize(
    ("changed", "why_not"),
    [
        ({"gpu": (75, 40)}, "from compute capability 8.0 (Ampere) on; this device has 7.5"),
        ({"x_row_stride": 8}, "the rows of x overlap"),
        ({"m": 2**31}, "M, N and K must be at most"),
    ],
)
def test_what_no_kernel_reads(changed: dict[str, Any], why_not: str) -> None:
    found = asked(replace(LARGE, **changed))
    assert not found["fused"] and found["candidates"] == [] and why_not in found["why_not_covered"]


TF32 = replace(LARGE, dtype="float32", arithmetic="tf32", tf32_allowed=True)


def test_on_hopper_tf32_is_left_to_tma() -> None:
    for m, n, k in SHAPES[::20]:
        found = replace(TF32, m=m, n=n, k=k, gpu=H200).plan()
        assert plans.MMA not in {each["family"] for each in found["candidates"]}


@pytest.mark.parametrize("gpu", [*AMPERE, H200])
@pytest.mark.parametrize("sizes", [(1, 8, 8), (16, 4096, 4096), (777, 1000, 520), (8192, 8192, 8192)])
def test_every_candidate_in_tf32_fits_its_gpu(gpu: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    found = asked(replace(TF32, m=m, n=n, k=k, gpu=gpu))
    mine = [each for each in found["candidates"] if each["family"] == plans.MMA]
    assert {each["tile"] for each in mine} == {"128x128x16", "128x256x16", "64x64x32"}
    assert all(each["shared_bytes"] <= 1024 * 99 and each["schedule"] == "multistage" for each in mine)


@pytest.mark.parametrize("changed", [{"k": 8190}, {"n": 8190}, {"alignment": 8}, {"x_row_stride": 8193}])
def test_tf32_reads_whole_vectors_alone(changed: dict[str, Any]) -> None:
    found = asked(replace(TF32, **changed))
    assert found["candidates"] == [] and not found["fused"]
    assert asked(replace(TF32, **changed, invariant=True))["candidates"] == []


def test_tf32_takes_twice_as_long() -> None:
    (of_16_bits, of_tf32) = (asked(each) for each in (LARGE, TF32))
    times = [each["candidates"][0]["predicted_us"] for each in (of_16_bits, of_tf32)]
    assert 1.8 < times[1] / times[0] < 2.5
    assert of_tf32["fallback_us"] == pytest.approx(2 * of_16_bits["fallback_us"], rel=0.02)


SPLIT = replace(LARGE, dtype="float32", arithmetic="split", packed=True)
SCALED = replace(SPLIT, arithmetic="scaled", tf32_allowed=True)
ON_SLICES = {"split": SPLIT, "scaled": SCALED}
on_slices = pytest.mark.parametrize("query", ON_SLICES.values(), ids=ON_SLICES)


@pytest.mark.parametrize("gpu", [*AMPERE, H200])
@on_slices
def test_slices_must_win_by_a_tenth_or_are_left_to_tma(gpu: tuple[int, ...], query: Query) -> None:
    for m, n, k in SHAPES[::10]:
        found = replace(query, m=m, n=n, k=k, gpu=gpu).plan()
        families = {each["family"] for each in found["candidates"]}
        assert plans.MMA not in families if gpu is H200 else families <= {plans.MMA}
        if gpu is not H200 and found["fused"]:
            assert found["fallback_us"] / found["predicted_us"] >= LEAST_RATIO


@pytest.mark.parametrize("gpu", [*AMPERE, H200])
@on_slices
def test_every_candidate_on_slices_fits_its_gpu(gpu: tuple[int, ...], query: Query) -> None:
    """Whatever N, K and the strides: the rows of slices are the package's own."""
    tiles = {"split": {"128x128x32", "64x128x32"}, "scaled": {"128x128x32", "128x256x32", "64x64x64"}}
    for m, n, k in ((16, 4096, 4096), (777, 1001, 521), (8192, 8192, 8192)):
        found = asked(replace(query, m=m, n=n, k=k, gpu=gpu, x_row_stride=k + 1))
        mine = [each for each in found["candidates"] if each["family"] == plans.MMA]
        assert {each["tile"] for each in mine} == tiles[query.arithmetic]
        assert all(each["shared_bytes"] <= 1024 * 99 and each["schedule"] == "multistage" for each in mine)


@pytest.mark.parametrize(
    ("gpu", "least", "most"),
    [
        ("A100 40 GB", 3.5, 5.3),
        ("A100 80 GB", 3.5, 5.3),
        ("A10", 1, 1.33),
        ("L40S", 1, 1.33),
        ("RTX 4090", 0, 0.67),
    ],
)
def test_three_products_of_fp16_against_sgemm(gpu: str, least: float, most: float) -> None:
    """At most by the rates: of tensor cores in 16 bits, a third, over that of fp32."""
    found = asked(replace(SPLIT, gpu=GPUS[gpu]))
    assert least < found["fallback_us"] / found["candidates"][0]["predicted_us"] < most
    if gpu == "RTX 4090":
        assert not found["fused"]
        assert (
            "PyTorch's GEMM with one elementwise kernel is expected to be at least as fast"
            in found["why_not"]
        )


@pytest.mark.parametrize("gpu", AMPERE)
def test_one_product_of_fp16_is_no_slower_than_one_of_tf32(gpu: tuple[int, ...]) -> None:
    of_slices, of_tf32 = (asked(replace(query, gpu=gpu))["candidates"][0] for query in (SCALED, TF32))
    assert 1.2 < of_tf32["predicted_us"] / of_slices["predicted_us"] < 2.2


@on_slices
def test_a_pack_saves_the_split_of_the_weight(query: Query) -> None:
    times = [
        asked(replace(query, packed=packed))["candidates"][0]["predicted_us"] for packed in (True, False)
    ]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("query", "why_not"),
    [
        (replace(SPLIT, k=127), "K = 127 is below 128"),
        (replace(SPLIT, m=15), "M = 15 is below 16"),
        (replace(SPLIT, m=2**31), "M and N must be at most"),
        (replace(SCALED, k=8193), "K = 8193 is outside 16..8192"),
    ],
    ids=["K", "M", "large", "long"],
)
def test_slices_are_taken_where_they_are_accurate(query: Query, why_not: str) -> None:
    """As on Hopper."""
    assert why_not in asked(query)["why_not"]


@on_slices
def test_the_invariant_plan_on_slices(query: Query) -> None:
    found = [asked(replace(query, m=m, k=4096, invariant=True))["candidates"] for m in (1, 77, 4096)]
    assert [each["tile"] for (each,) in found] == 3 * ["128x128x32"]


def test_long_sums_in_tf32_are_no_less_accurate_than_cublas() -> None:
    """As on Hopper: the tensor cores truncate when they accumulate."""
    assert asked(replace(TF32, k=12288))["candidates"] != []
    found = asked(replace(TF32, k=16384))
    assert found["candidates"] == [] and "less accurate than cuBLAS" in found["why_not"]
    # Of few tiles K may be divided into parts of 4096.
    found = asked(replace(TF32, m=64, n=256, k=16384))
    assert found["candidates"] and all(each["splits"] == 4 for each in found["candidates"])


def test_the_invariant_plan_in_tf32() -> None:
    found = [asked(replace(TF32, m=m, invariant=True))["candidates"] for m in (1, 77, 4096)]
    assert [each["tile"] for (each,) in found] == 3 * ["128x128x16"]


def test_the_invariant_plan_does_not_depend_on_m() -> None:
    for k, schedule in ((4096, "multistage"), (4095, "by elements")):
        found = [asked(Query(m=m, k=k, gpu=LARGE.gpu, invariant=True))["candidates"] for m in (1, 77, 4096)]
        assert {tuple(each["plan"]) for (each,) in found} == {tuple(found[0][0]["plan"])}
        assert found[0][0]["schedule"] == schedule


def ctas(candidate: dict[str, Any], query: Query) -> int:
    m, n, _ = map(int, candidate["tile"].split("x"))
    return math.ceil(query.m / m) * math.ceil(query.n / n) * int(candidate["splits"])


@pytest.mark.parametrize("gpu", [*AMPERE, H200])
@pytest.mark.parametrize("query", [LARGE, TF32, SPLIT, SCALED], ids=["16 bits", "TF32", "split", "scaled"])
def test_k_is_divided_where_tiles_are_few(gpu: tuple[int, ...], query: Query) -> None:
    """Into shares of a stage at least, and no more of them than CTAs run at once."""
    most_at_once = 32 * gpu[1]
    for m, n, k in (
        (16, 256, 8192),
        (64, 4096, 4096),
        (300, 512, 128),
        (8192, 8192, 8192),
    ):
        asking = replace(query, m=m, n=n, k=k, gpu=gpu)
        mine = [each for each in asked(asking)["candidates"] if each["family"] == plans.MMA]
        for each in mine:
            rows, _, columns = map(int, each["tile"].split("x"))
            assert each["splits"] in ((1, 2, 4, 8) if rows == 16 else (1, 2, 4))
            assert each["splits"] * columns < k + columns
            assert each["splits"] == 1 or ctas(each, asking) < 2 * most_at_once
        assert any(each["splits"] == 1 for each in mine) == bool(mine)
        assert any(each["splits"] > 1 for each in mine) == (m < 8192 and bool(mine))


@pytest.mark.parametrize("gpu", ["A100 40 GB", "A100 80 GB", "RTX 4090"])
def test_the_fastest_plan_of_few_tiles_and_a_long_k_divides_it(gpu: str) -> None:
    """By the model, which is assumed: 64 tiles of 64x64, or 32 of 64x128, leave many multiprocessors without work."""
    few = Query(m=64, n=4096, k=4096, gpu=GPUS[gpu])
    best = asked(few)["candidates"][0]
    assert best["family"] == plans.MMA and best["splits"] > 1
    for asking in (replace(few, k=256), replace(few, m=8192, n=8192, k=8192)):
        assert asked(asking)["candidates"][0]["splits"] == 1


def test_a_batch_invariant_call_does_not_divide_k() -> None:
    for query in (LARGE, TF32, SPLIT, SCALED):
        (found,) = asked(replace(query, m=64, n=256, k=4096, invariant=True))["candidates"]
        assert found["splits"] == 1


def test_half_rate_sums_take_longer() -> None:
    capability, multiprocessors, clock, bandwidth, l2, is_half = GPUS["RTX 4090"]
    assert is_half
    whole = (capability, multiprocessors, clock, bandwidth, l2, 0)
    slow, fast = (asked(replace(LARGE, gpu=gpu)) for gpu in (GPUS["RTX 4090"], whole))
    assert slow["fallback_us"] > 1.9 * fast["fallback_us"]
    assert slow["candidates"][0]["predicted_us"] > 1.9 * fast["candidates"][0]["predicted_us"]


@pytest.mark.parametrize("multiplied", MULTIPLIED.values(), ids=MULTIPLIED)
def test_a_choice_gains_a_tenth(multiplied: tuple[str, str]) -> None:
    """A fifth by elements, and of a short fp32 product with a short K."""
    every = list(choices(multiplied))
    assert len(every) == len(GPUS) * len(SHAPES)
    for choice in every:
        _, n, k = choice.shape
        if multiplied == FP32:
            least = 1.20 if choice.fallback_us < 20 and k < 600 else 1.10
        else:
            least = 1.10 if n % 8 == 0 and k % 8 == 0 else 1.20
        assert (choice.tile != Choice.FALLBACK) == (choice.gain >= least)


def test_the_shapes_are_of_every_kind() -> None:
    assert len(set(SHAPES)) == len(SHAPES) == 200
    for axis, least, most in ((0, 1, 8192), (1, 64, 32768), (2, 64, 28672)):
        sizes = [shape[axis] for shape in SHAPES]
        assert min(sizes) <= least and max(sizes) >= most
    assert any(n % 8 or k % 8 for _, n, k in SHAPES)
    pairs = itertools.product((True, False), repeat=2)
    assert {(m > 64, n % 8 == 0) for m, n, _ in SHAPES} == set(pairs)


def test_the_table_is_what_the_command_writes() -> None:
    """`python -m tools.mma_choices > tests/gemm/mma_choices.txt`."""
    assert (Path(__file__).parent / "mma_choices.txt").read_text() == table()
