"""The planner: properties that refitted cost models must keep."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epigemm._native import ops
from tests.gemm.query import ALL_TYPES, H200, ROWS, SIZES, SWAP_AB, WINS, Query, assert_well_formed, tile_size
from tests.support.cases import LINEAR
from tests.support.plans import FEW_ROWS, FP16X3


def test_long_tf32_sums_are_split_or_left_to_cublas() -> None:
    for m, k in [(16, 16384), (512, 16384), (4096, 32768), (64, 200_000)]:
        plan = Query(m=m, n=512, k=k, dtype="float32", arithmetic="tf32").plan()
        for candidate in plan["candidates"]:
            if candidate["family"] == FEW_ROWS:  # in fp32, by no tensor core
                continue
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


def times_by_plan(query: Query) -> dict[tuple[int, ...], float]:
    """Each candidate's time, and the fallback's as that of ()."""
    answer = query.plan()
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
    times = times_by_plan(query)
    for faster in (
        (capability, multiprocessors, clock, 2 * bandwidth),
        (capability, multiprocessors, 2 * clock, bandwidth),
    ):
        other = times_by_plan(replace(query, gpu=faster))
        assert set(other) == set(times), "what is worth a look is no matter of speed"
        for plan, time in times.items():
            assert other[plan] <= time * (1 + 1e-5), (faster, plan)  # as written: six digits


# --- fp32 products of fp16 slices -------------------------------------------------------------------------------------


SPLIT = Query(m=1024, dtype="float32", arithmetic="split", packed=True)
SCALED = replace(SPLIT, arithmetic="scaled", tf32_allowed=True)


def test_the_baseline_is_what_torch_may_use() -> None:
    """A call that would do with TF32 is compared with SGEMM where torch's setting allows no TF32."""
    allowed, kept = SCALED.plan(), replace(SCALED, tf32_allowed=False).plan()
    assert allowed["predicted_us"] == kept["predicted_us"]
    assert kept["fallback_us"] == SPLIT.plan()["fallback_us"] > 3 * allowed["fallback_us"]


def test_a_pack_is_recommended_where_it_decides() -> None:
    """At so few rows splitting the weight takes longer than the product. No kernel reads its odd rows as they lie."""
    plain = replace(SPLIT, n=4096, k=4098)
    queries = ((replace(plain, m=m), replace(plain, m=m, packed=False)) for m in range(1, 1024))
    kept, split = next((one, other) for one, other in queries if one.plan()["fused"] > other.plan()["fused"])
    assert "see pack" in split.plan()["why_not"]
    assert kept.plan()["candidates"][0]["predicted_us"] < split.plan()["candidates"][0]["predicted_us"]


def test_a_weight_without_a_pack_is_read_as_it_lies() -> None:
    """With up to some hundred rows. Not where TMA cannot read its rows, nor in place of a pack."""
    plain = replace(SPLIT, m=128, n=8192, k=8192, packed=False)
    assert plain.plan()["reads_weight"] and replace(plain, m=16).plan()["reads_weight"]
    for other in (
        replace(plain, packed=True),
        replace(plain, m=8192),
        replace(plain, m=300, k=1000),  # nor over several tiles at a short K
        replace(plain, k=8190),
        replace(plain, weight_row_stride=8195),
        replace(plain, alignment=4),
        replace(plain, invariant=True),
    ):
        assert not any(each["reads_weight"] for each in other.plan()["candidates"][:1]), other


@pytest.mark.parametrize("m", [16, 64, 128])
@pytest.mark.parametrize("n", [1024, 4096, 8192])
def test_few_tiles_share_k(m: int, n: int) -> None:
    """As many CTAs as there are multiprocessors, each with 512 of K or more; not where tiles are enough."""
    few = replace(SPLIT, m=m, n=n, packed=False)
    candidates = few.plan()["candidates"]
    fastest = next(each for each in candidates if each["reads_weight"])
    rows, columns = tile_size(fastest)
    ctas = math.ceil(m / rows) * math.ceil(n / columns) * fastest["splits"]
    assert 56 <= ctas <= 132 and fastest["splits"] > 1
    assert {each["splits"] for each in candidates if not each["reads_weight"]} == {1}
    short = replace(few, k=1000)
    assert all(each["splits"] == 1 for each in short.plan()["candidates"])
    assert all(each["splits"] == 1 for each in replace(few, n=32768).plan()["candidates"])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("k", [127, 1])
def test_a_k_outside_the_accuracys_limits_can_be_run(k: int, invariant: bool) -> None:
    """By force, or for a batch-invariant call that has nothing else."""
    plan = replace(SPLIT, k=k, invariant=invariant).plan()
    assert not plan["fused"] and plan["why_not_covered"] == ""
    assert plan["why_not"] == (
        f"K = {k} is below 128, from where on the split's error is below that of an IEEE fp32 product"
    )


def test_layouts_play_no_part() -> None:
    """The slices are laid out by us: odd sizes and strides, any alignment."""
    aligned = replace(SPLIT, m=1023, n=8191, k=8193)
    odd = replace(aligned, x_row_stride=8195, weight_row_stride=9001, out_row_stride=8191, alignment=4)
    assert aligned.plan()["fused"] and odd.plan()["plan"] == aligned.plan()["plan"]


# --- epilogues that are made at run time: their matrices and their cost -----------------------------------------------


PER_COLUMN, MATRIX = 1, 4  # csrc/epilogue/operands.h
_names = (f"test_planner_functors.{number}" for number in count())
SHAPES = [(16, 4096, 4096), (300, 1000, 512), (4096, 4096, 512), (16384, 8192, 4096)]


def made(*, matrices: int = 0, of_compute: bool = False, primitives: str = "", is_short: bool = True) -> str:
    """The name of a new epilogue: of a bias and of matrices."""
    name = next(_names)
    operands = ["bias", *(f"matrix{number}" for number in range(matrices))]
    kinds = [PER_COLUMN, *[MATRIX] * matrices]
    folded = [0, *[int(of_compute)] * matrices]
    ops._register_epilogue(name, ",".join(operands), kinds, folded, 1, primitives, is_short)
    return name


@pytest.mark.parametrize(("dtype", "arithmetic"), ALL_TYPES)
@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("primitives", "built_in"), [("", "relu_div"), ("sigmoid", "sigmoid_scale_residual")]
)
def test_the_like_of_a_built_in_is_planned_like_it(
    primitives: str, built_in: str, size: tuple[int, int, int], dtype: str, arithmetic: str
) -> None:
    m, n, k = size
    query = Query(epilogue=made(primitives=primitives), m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic)
    assert times_by_plan(query) == times_by_plan(replace(query, epilogue=built_in))


@pytest.mark.parametrize(("dtype", "arithmetic"), ALL_TYPES)
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_a_matrix_is_read(size: tuple[int, int, int], dtype: str, arithmetic: str) -> None:
    """Once, by whichever kernel: a plan takes longer by what reading it alone would take, and a longer epilogue."""
    m, n, k = size
    query = Query(m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic)
    none, one, two = (times_by_plan(replace(query, epilogue=made(matrices=number))) for number in range(3))
    wide = times_by_plan(replace(query, epilogue=made(matrices=1, of_compute=True)))
    us = m * n * (4 if dtype == "float32" else 2) / H200[3]
    for plan, time in none.items():
        # A prediction is written with six digits; sustained load, and the memory's own factor, add to a kernel's time.
        assert time < one[plan] <= 1.2 * time + 1.4 * us
        assert one[plan] < two[plan]
        assert wide[plan] == (one if dtype == "float32" else two)[plan]
    assert one[()] - none[()] == pytest.approx(us, abs=1e-5 * one[()])


def test_an_epilogue_that_takes_longer_than_it_saves_is_an_elementwise_kernel() -> None:
    """A digamma of the accurate kind behind a short K."""
    query = Query(epilogue=made(primitives="mul,digamma", is_short=False), m=131072, n=256, k=256)
    answer = query.plan()
    assert not answer["fused"]
    assert "us more within the product" in answer["why_not"]
    assert "us more in an elementwise kernel" in answer["why_not"]
    bare = replace(query, epilogue=made()).plan()
    assert "the epilogue" not in bare["why_not"]


# --- no argument crashes it; its words: tests/net/explanations.txt ----------------------------------------------------


ANY = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 70000)
SIZE = st.integers(0, 40000) | st.integers(0, 2**31 - 1)


def no_constant(name: str) -> float:
    raise AssertionError(f"{name} in an answer")


@given(
    values=st.tuples(ANY, ANY, ANY, ANY, ANY, ANY, ANY),
    types=st.sampled_from([*ALL_TYPES, ("float32", "ieee"), ("float64", "ieee")]),
    flags=st.tuples(*[st.booleans()] * 4),
    gpu=st.lists(ANY, max_size=5) | st.tuples(st.just(90), ANY, ANY, ANY).map(list),
)
def test_no_numbers_crash_it(
    values: tuple[int, ...], types: tuple[str, str], flags: tuple[bool, ...], gpu: list[int]
) -> None:
    """Nonsense is answered: by a reason, or by a RuntimeError, never by a signal or by nonsense."""
    m, n, k, *strides, alignment = values
    try:
        text = torch.ops.epigemm._plan("bias", m, n, k, strides, alignment, *types, *flags, gpu, -1)
    except RuntimeError:
        return
    plan = json.loads(text, parse_constant=no_constant)
    assert plan["fused"] or plan["why_not"]
    if min(values[:3]) < 1:
        assert not plan["fused"]


@given(
    m=SIZE,
    n=SIZE,
    k=SIZE,
    types=st.sampled_from(ALL_TYPES),
    gpu=st.sampled_from([(90, 1), (90, 78), (90, 114), (90, 132), H200]),
    packed=st.booleans(),
)
def test_any_sensible_size_gets_a_sensible_answer(
    m: int, n: int, k: int, types: tuple[str, str], gpu: tuple[int, ...], packed: bool
) -> None:
    query = Query(m=m, n=n, k=k, dtype=types[0], arithmetic=types[1], gpu=gpu, packed=packed)
    plan = query.plan()
    if plan["fused"]:
        assert_well_formed(plan, query)
        assert plan["predicted_us"] <= plan["fallback_us"]
    else:
        assert plan["why_not"]
    assert plan["why_not"] or not plan["why_not_covered"]
