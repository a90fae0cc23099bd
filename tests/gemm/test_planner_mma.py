"""The planner and the mma.sync kernels, for described GPUs: by assumed costs a fused plan has to win by a tenth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.gemm.query import H200, Query
from tests.support import plans
from tools.mma_choices import FP32, GPUS, MULTIPLIED, SHAPES, Choice, choices

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KB of a CTA
LARGE = Query(m=8192, n=8192, k=8192, gpu=GPUS["A100 40 GB"])
TF32 = replace(LARGE, dtype="float32", arithmetic="tf32", tf32_allowed=True)
SPLIT = replace(LARGE, dtype="float32", arithmetic="split", packed=True)
SCALED = replace(SPLIT, arithmetic="scaled", tf32_allowed=True)
EVERY = {
    "fp16": replace(LARGE, dtype="float16"),
    "bf16": LARGE,
    "TF32": TF32,
    "split": SPLIT,
    "scaled": SCALED,
}
TILES = {
    "tf32": {"128x128x16", "128x256x16", "64x64x32"},
    "split": {"128x128x32", "64x128x32"},
    "scaled": {"128x128x32", "128x256x32", "64x64x64"},
}
every = pytest.mark.parametrize("query", EVERY.values(), ids=EVERY)
gpus = pytest.mark.parametrize("gpu", [*GPUS.values(), H200])


def asked(query: Query) -> dict[str, Any]:
    return replace(query, any_family=True).plan()


def mine(query: Query) -> list[dict[str, Any]]:
    """The candidates of this family, whatever others there are."""
    return [each for each in asked(query)["candidates"] if each["family"] == plans.MMA]


@every
def test_hopper_is_left_to_tma_but_for_rows_that_it_refuses(query: Query) -> None:
    """Those alone are offered: elsewhere the kernels that load by TMA are faster."""
    is_16_bits = query.dtype != "float32"
    for m, n, k in SHAPES[::5]:
        candidates = replace(query, m=m, n=n, k=k, gpu=H200).plan()["candidates"]
        found = [each for each in candidates if each["family"] == plans.MMA]
        assert found == (candidates if is_16_bits and (n % 8 or k % 8) else [])
        assert all(each["schedule"] == "by elements" for each in found)
        assert candidates or not is_16_bits


@gpus
@pytest.mark.parametrize("sizes", [(1, 8, 8), (16, 4096, 4096), (777, 1000, 520), (8192, 8192, 8192)])
@every
def test_every_candidate_fits_its_gpu(
    gpu: tuple[int, ...], sizes: tuple[int, int, int], query: Query
) -> None:
    """On slices whatever the strides: their rows are the package's own."""
    m, n, k = sizes
    on_slices = query in (SPLIT, SCALED)
    if on_slices and m < 16:
        return
    asking = replace(query, m=m, n=n, k=k, gpu=gpu, x_row_stride=k + 1 if on_slices else k)
    found, candidates = mine(asking), asking.plan()["candidates"]
    assert gpu == H200 or {each["family"] for each in candidates} <= {plans.MMA}
    tiles = {each["tile"] for each in found}
    assert found and all(each["schedule"] == "multistage" and each["predicted_us"] > 0 for each in found)
    assert all(each["shared_bytes"] <= 1024 * SHARED[gpu[0]] for each in found)
    if query.dtype == "float32":
        assert tiles == TILES[query.arithmetic] and all(each["shared_bytes"] <= 1024 * 99 for each in found)
    else:
        assert bool(tiles & {"128x256x64", "256x128x64"}) == (SHARED[gpu[0]] > 144)


@pytest.mark.parametrize(
    "changed", [{"k": 8191}, {"n": 8191}, {"alignment": 2}, {"alignment": 8}, {"x_row_stride": 8193}]
)
def test_rows_that_are_no_whole_vectors(changed: dict[str, Any]) -> None:
    """In 16 bits they are read by elements, but for no batch-invariant call of this size; in TF32 not at all."""
    assert {each["schedule"] for each in mine(replace(LARGE, **changed))} == {"by elements"}
    for query in (replace(LARGE, **changed, invariant=True), replace(TF32, **changed)):
        found = query.plan()
        assert not found["fused"] and found["candidates"] == []


def test_long_sums_in_tf32_are_no_less_accurate_than_cublas() -> None:
    """As on Hopper: the tensor cores truncate when they accumulate."""
    assert mine(replace(TF32, k=12288)) != []
    found = asked(replace(TF32, k=16384))
    assert found["candidates"] == [] and "less accurate than cuBLAS" in found["why_not"]
    # Of few tiles K may be divided into parts of 4096.
    parts = mine(replace(TF32, m=64, n=256, k=16384))
    assert parts and all(each["splits"] == 4 for each in parts)


@every
def test_the_invariant_plan_does_not_depend_on_m(query: Query) -> None:
    """One tile that does not divide K."""
    (plan,) = {
        tuple(each["plan"])
        for m in (1, 77, 4096)
        for each in mine(replace(query, m=m, k=4096, invariant=True))
    }
    assert plan[4] == 1
    found = replace(query, k=4096, invariant=True).plan()
    assert [each["tile"] for each in found["candidates"]] == ["128x128x16" if query is TF32 else "128x128x32"]
    if query.dtype != "float32":
        assert {
            each["schedule"] for m in (1, 77) for each in mine(replace(query, m=m, k=4095, invariant=True))
        } == {"by elements"}


def ctas(candidate: dict[str, Any], query: Query) -> int:
    m, n, _ = map(int, candidate["tile"].split("x"))
    return math.ceil(query.m / m) * math.ceil(query.n / n) * int(candidate["splits"])


@gpus
@every
def test_k_is_divided_where_tiles_are_few(gpu: tuple[int, ...], query: Query) -> None:
    """Into shares of a stage at least, and no more of them than CTAs run at once."""
    most_at_once = 32 * gpu[1]
    for m, n, k in ((16, 256, 8192), (64, 4096, 4096), (300, 512, 128), (8192, 8192, 8192)):
        asking = replace(query, m=m, n=n, k=k, gpu=gpu)
        found = mine(asking)
        for each in found:
            rows, _, columns = map(int, each["tile"].split("x"))
            assert each["splits"] in ((1, 2, 4, 8) if rows == 16 else (1, 2, 4))
            assert each["splits"] * columns < k + columns
            assert each["splits"] == 1 or ctas(each, asking) < 2 * most_at_once
        assert any(each["splits"] == 1 for each in found) == bool(found)
        assert any(each["splits"] > 1 for each in found) == (m < 8192 and bool(found))


@pytest.mark.parametrize("multiplied", MULTIPLIED.values(), ids=MULTIPLIED)
def test_a_choice_gains_a_tenth(multiplied: tuple[str, str]) -> None:
    """A fifth by elements, and of a short fp32 product with a short K."""
    found = list(choices(multiplied))
    assert len(found) == len(GPUS) * len(SHAPES)
    for choice in found:
        _, n, k = choice.shape
        if multiplied == FP32:
            least = 1.20 if choice.fallback_us < 20 and k < 600 else 1.10
        else:
            least = 1.10 if n % 8 == 0 and k % 8 == 0 else 1.20
        assert (choice.tile != Choice.FALLBACK) == (choice.gain >= least)
