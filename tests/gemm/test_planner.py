"""The planner: properties that refitted cost models must keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gemm.query import (
    ALL_TYPES,
    H200,
    ROWS,
    SIZES,
    SWAP_AB,
    WINS,
    Query,
    assert_well_formed,
    tile_size,
)
from tests.support.cases import LINEAR
from tests.support.plans import FP16X3


def test_long_tf32_sums_are_split_or_left_to_cublas() -> None:
    for m, k in [(16, 16384), (512, 16384), (4096, 32768), (64, 200_000)]:
        plan = Query(m=m, n=512, k=k, dtype="float32", arithmetic="tf32").plan()
        for candidate in plan["candidates"]:
            assert k / candidate["splits"] <= 4096, candidate
        assert plan["fused"] or plan["why_not"]
    assert (
        "less accurate than cuBLAS" in Query(k=200_000, dtype="float32", arithmetic="tf32").plan()["why_not"]
    )
    assert any(
        c["splits"] == 1 for c in Query(k=12288, dtype="float32", arithmetic="tf32").plan()["candidates"]
    )
    assert any(c["splits"] == 1 for c in Query(k=200_000).plan()["candidates"]), (
        "16 bits round more than that"
    )


@pytest.mark.parametrize("query", WINS.values(), ids=WINS)
def test_what_is_faster_by_far_is_fused(query: Query) -> None:
    plan = query.plan()
    assert plan["fused"] and plan["predicted_us"] < plan["fallback_us"]
    assert_well_formed(plan, query)


@pytest.mark.parametrize("m", [1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("types", ALL_TYPES, ids="-".join)
def test_no_candidate_is_taller_than_needed(m: int, types: tuple[str, str]) -> None:
    """Neither is half of a tile empty where a lower one does, nor does a weight stream by more often than twice."""
    for n, k in ((8192, 8192), (512, 1024)):
        plan = Query(m=m, n=n, k=k, dtype=types[0], arithmetic=types[1]).plan()
        assert plan["candidates"] or (types[1] == "split" and m < 16)
        for candidate in plan["candidates"]:
            rows = tile_size(candidate)[0]
            if candidate["family"] == SWAP_AB:
                assert rows == 16 or rows < 2 * m, candidate
                assert rows >= 64 or m <= 2 * rows, candidate
            if candidate["reads_weight"]:
                assert rows >= 64 or m <= 2 * rows, candidate
            elif candidate["family"] == FP16X3 and "transposed" in candidate["schedule"]:
                assert m <= (2 * rows if rows == 16 else rows), candidate


@pytest.mark.parametrize("types", ALL_TYPES, ids="-".join)
def test_predicted_time_grows_with_the_problem(types: tuple[str, str]) -> None:
    """Doubling M, N or K of a large problem can not be predicted to take less time, nor above 2.5 times as much."""
    base = Query(m=2048, n=4096, k=4096, dtype=types[0], arithmetic=types[1])
    times = times_of(base)
    for larger in (replace(base, m=4096), replace(base, n=8192), replace(base, k=8192)):
        for time, more in zip(times, times_of(larger), strict=True):
            assert time <= more <= 2.5 * time


def times_of(query: Query) -> tuple[float, float]:
    """Of the fastest fused kernel, and of the fallback."""
    plan = query.plan()
    return float(plan["candidates"][0]["predicted_us"]), float(plan["fallback_us"])


@pytest.mark.parametrize("types", ALL_TYPES, ids="-".join)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_more_rows_take_no_less_time(n: int, k: int, types: tuple[str, str]) -> None:
    """But for what tiles and waves do, which is little."""
    query = Query(n=n, k=k, dtype=types[0], arithmetic=types[1])
    if types[1] == "split" and k < 128:
        assert "below 128" in query.plan()["why_not"]
        return
    rows = [m for m in ROWS if types[1] != "split" or m >= 16]
    fused, fallback = zip(*(times_of(replace(query, m=m)) for m in rows), strict=True)
    for times, least in ((fused, 0.9), (fallback, 0.7)):  # cuBLAS has other kernels for few rows
        assert all(more >= least * less for less, more in pairwise(times)), times
        assert times[-1] > 4 * times[0]


# --- devices that are described --------------------------------------------------------------------------------------


def times_by_plan(answer: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Each candidate's time, and the fallback's as that of ()."""
    times = {tuple(each["plan"]): float(each["predicted_us"]) for each in answer["candidates"]}
    return {**times, (): float(answer["fallback_us"])}


@given(
    m=st.integers(1, 20000),
    n=st.integers(1, 2000).map(lambda n: 8 * n),
    k=st.integers(16, 2000).map(lambda k: 8 * k),
    types=st.sampled_from([*ALL_TYPES, ("float32", "ieee"), ("float64", "ieee")]),
    gpu=st.sampled_from([H200, (90, 114, 1755, 1800000), (90, 78, 1500, 3500000)]),
    epilogue=st.sampled_from(LINEAR),
)
def test_a_faster_device_takes_no_longer(
    m: int, n: int, k: int, types: tuple[str, str], gpu: tuple[int, int, int, int], epilogue: str
) -> None:
    query = Query(epilogue=epilogue, m=m, n=n, k=k, dtype=types[0], arithmetic=types[1], gpu=gpu)
    capability, multiprocessors, clock, bandwidth = gpu
    times = times_by_plan(query.plan())
    for faster in (
        (capability, multiprocessors, clock, 2 * bandwidth),
        (capability, multiprocessors, 2 * clock, bandwidth),
    ):
        other = times_by_plan(replace(query, gpu=faster).plan())
        assert set(other) == set(times), "what is worth a look is no matter of speed"
        for plan, time in times.items():
            assert other[plan] <= time * (1 + 1e-5), (faster, plan)  # as written: six digits
