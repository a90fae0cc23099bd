"""The pure dispatch function: properties that a retuned cost model must keep, exact reasons, no crash on anything."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import ELEMENTWISE, LINEAR


@dataclass(frozen=True)
class Query:
    """Arguments of `_plan_linear`, in its order: a large aligned problem on an H200 unless said otherwise.

    Against its epilogue torch needs two kernels.
    """

    epilogue: str = "relu_div"
    m: int = 1024
    n: int = 8192
    k: int = 8192
    x_row_stride: int | None = None
    weight_row_stride: int | None = None
    out_row_stride: int | None = None
    alignment: int = 256
    dtype: str = "bfloat16"
    arithmetic: str = "ieee"
    capability: int = 90
    multiprocessors: int = 132
    has_bias: bool = True

    def plan(self) -> dict[str, Any]:
        values = asdict(self)
        for stride, size in (
            ("x_row_stride", self.k),
            ("weight_row_stride", self.k),
            ("out_row_stride", self.n),
        ):
            values[stride] = size if values[stride] is None else values[stride]
        plan: dict[str, Any] = json.loads(torch.ops.epigemm._plan_linear(*values.values()))
        return plan


FUSED_TYPES = [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32")]
ROWS = [1, 2, 8, 16, 17, 63, 64, 65, 96, 127, 128, 129, 200, 256, 512, 1000, 1024, 4096, 16384, 100000]
SIZES = [(8192, 8192), (4096, 4096), (512, 1024), (1024, 256), (28672, 8192), (128, 8192), (8192, 64)]


def tile_size(plan: dict[str, Any]) -> tuple[int, int]:
    m, n, _ = (int(part) for part in plan["tile"].split("x"))
    return m, n


def cluster_size(plan: dict[str, Any]) -> tuple[int, int]:
    m, n = (int(part) for part in plan["cluster"].split("x")[:2])
    return m, n


def grid(plan: dict[str, Any], m: int, n: int) -> tuple[int, int]:
    """Clusters that cover the output along M and along N."""
    (tile_m, tile_n), (cluster_m, cluster_n) = tile_size(plan), cluster_size(plan)
    return math.ceil(m / (tile_m * cluster_m)), math.ceil(n / (tile_n * cluster_n))


def padding(plan: dict[str, Any], m: int, n: int) -> float:
    """Clusters walked in vain: CUTLASS rounds the grid up to strips of `swizzle` clusters along both axes."""
    clusters = grid(plan, m, n)
    padded = [math.ceil(count / plan["swizzle"]) * plan["swizzle"] for count in clusters]
    return float(padded[0] * padded[1] / (clusters[0] * clusters[1]) - 1)


def assert_well_formed(plan: dict[str, Any], query: Query) -> None:
    assert plan["fused"] is True and plan["why_not"] == ""
    assert plan["tile_index"] >= 0
    assert plan["schedule"] in {"cooperative", "pingpong", "narrow"}
    assert plan["splits"] in ({1, 2, 4, 8} if plan["schedule"] == "narrow" else {1})
    assert plan["splits"] <= math.ceil(query.k / int(plan["tile"].split("x")[2])), "a CTA without a part of K"
    assert plan["raster"] in {"along_m", "along_n"}
    assert plan["swizzle"] in {1, 2, 4, 8}
    assert math.isfinite(plan["predicted_us"]) and plan["predicted_us"] > 0
    for candidate in plan["candidates"]:
        assert math.isfinite(candidate["predicted_us"]) and candidate["predicted_us"] > 0
        assert candidate["predicted_us"] >= plan["predicted_us"], "the pick is not the fastest candidate"
    assert any(c["tile"] == plan["tile"] and c["cluster"] == plan["cluster"] for c in plan["candidates"])
    assert plan["schedule"] == "narrow" or padding(plan, query.m, query.n) <= 0.5, plan


@pytest.mark.parametrize("epilogue", LINEAR)
@pytest.mark.parametrize(("dtype", "arithmetic"), FUSED_TYPES)
def test_large_aligned_problems_fuse(epilogue: str, dtype: str, arithmetic: str) -> None:
    for m in (1024, 16384):
        query = Query(epilogue=epilogue, m=m, dtype=dtype, arithmetic=arithmetic)
        plan = query.plan()
        if epilogue in {"bias", "bias_relu"} and not plan["fused"]:  # PyTorch's GEMM does all of it
            assert "adds a bias" in plan["why_not"]
        else:
            assert_well_formed(plan, query)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_plans_are_well_formed(m: int, n: int, k: int) -> None:
    for dtype, arithmetic in FUSED_TYPES:
        query = Query(m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic)
        plan = query.plan()
        if plan["fused"]:
            assert_well_formed(plan, query)
        else:
            assert plan["why_not"]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_relu_behind_a_bias_is_no_second_kernel(n: int, k: int) -> None:
    """cuBLAS applies both, where there is a bias and the result has no gaps between its rows."""
    for m in ROWS:
        query = Query(epilogue="bias_relu", m=m, n=n, k=k)
        bias, relu, bare = (
            replace(query, epilogue="bias").plan(),
            query.plan(),
            replace(query, has_bias=False).plan(),
        )
        assert relu["second_path_us"] <= bias["second_path_us"] < bare["second_path_us"]
        gaps = replace(query, out_row_stride=n + 8).plan()["second_path_us"]
        assert (gaps > relu["second_path_us"]) == (m > 1)
        if not relu["fused"]:
            assert "adds a bias and ReLU itself" in relu["why_not"]


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


def test_candidates_are_told_where_torch_is_expected_to_be_faster() -> None:
    plan = Query(epilogue="bias", m=128).plan()
    assert not plan["fused"] and plan["source"] == "model" and "tile" not in plan
    assert plan["candidates"][0]["predicted_us"] > plan["second_path_us"] > 0
    assert Query(dtype="float64").plan()["candidates"] == []


def test_swizzle_never_pads_the_main_shapes() -> None:
    """A swizzle that does not divide the grid walks empty tiles: measured, a factor of 2.8 at M = 1024."""
    for m, n, k in [(1024, 8192, 8192), (16384, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 4096)]:
        for dtype, arithmetic in FUSED_TYPES:
            plan = Query(m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic).plan()
            assert padding(plan, m, n) == 0, plan


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_small_m_never_takes_256_rows(m: int) -> None:
    for n, k in [(8192, 8192), (4096, 4096), (28672, 8192)]:
        plan = Query(m=m, n=n, k=k).plan()
        if plan["fused"]:
            assert tile_size(plan)[0] < 256, plan


def test_the_main_shapes_do_not_take_the_small_tile() -> None:
    for m, n, k in [(1024, 8192, 8192), (16384, 4096, 4096), (8192, 8192, 8192)]:
        tile_m, tile_n = tile_size(Query(m=m, n=n, k=k).plan())
        assert tile_m * tile_n >= 128 * 128


def test_predicted_time_grows_with_the_problem() -> None:
    """Doubling M, N or K of a large problem can not be predicted to take less time, nor above 2.5 times as much."""
    base = Query(m=2048, n=4096, k=4096)
    time = base.plan()["predicted_us"]
    for larger in (replace(base, m=4096), replace(base, n=8192), replace(base, k=8192)):
        assert time <= larger.plan()["predicted_us"] <= 2.5 * time


def test_predicted_time_of_the_main_shape_is_plausible() -> None:
    """2 M N K operations at between 1/4 of an H200's dense bf16 peak and the peak itself (989 TFLOP/s)."""
    plan = Query().plan()
    at_peak = 2 * 1024 * 8192 * 8192 / 989e12 * 1e6
    assert at_peak <= plan["predicted_us"] <= 4 * at_peak


def test_the_choice_is_a_pure_function() -> None:
    for m in ROWS:
        assert Query(m=m).plan() == Query(m=m).plan()


REFUSED: list[tuple[str, Query, list[str]]] = [
    ("fp64", Query(dtype="float64"), ["float64"]),
    ("ieee fp32", Query(dtype="float32", arithmetic="ieee"), ["IEEE fp32"]),
    ("before Hopper", Query(capability=80), ["9.0", "8.0"]),
    ("after Hopper", Query(capability=100), ["9.0", "10.0"]),
    ("not a CUDA device", Query(capability=0), ["CUDA"]),
    ("odd K", Query(k=8191), ["8191", "16 bytes"]),
    ("odd N", Query(n=8191), ["8191", "16 bytes"]),
    ("K of 12 elements in bf16", Query(k=12), ["12", "16 bytes"]),
    ("misaligned pointer", Query(alignment=8), ["aligned to 8 bytes", "16"]),
    ("odd stride of x", Query(x_row_stride=8193), ["x", "8193"]),
    ("odd stride of weight", Query(weight_row_stride=8193), ["weight", "8193"]),
    ("odd stride of out", Query(out_row_stride=8193), ["out", "8193"]),
    ("no rows", Query(m=0), ["empty", "M = 0"]),
    ("no columns", Query(n=0), ["empty", "N = 0"]),
    ("no K", Query(k=0), ["empty", "K = 0"]),
]


@pytest.mark.parametrize(
    ("query", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_why_not(query: Query, words: list[str]) -> None:
    plan = query.plan()
    assert plan["fused"] is False
    for word in words:
        assert word in plan["why_not"], plan["why_not"]


@pytest.mark.parametrize("epilogue", [name for name in ELEMENTWISE if name not in LINEAR])
def test_elementwise_only_epilogues_have_no_fused_kernel(epilogue: str) -> None:
    plan = Query(epilogue=epilogue).plan()
    assert plan["fused"] is False and epilogue in plan["why_not"]


def test_a_reason_names_the_first_obstacle_only_when_there_is_one() -> None:
    assert Query().plan()["why_not"] == ""


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epilogue": "no_such"}, "no_such"),
        ({"dtype": "int8"}, "int8"),
        ({"arithmetic": "tf33"}, "tf33"),
    ],
)
def test_unknown_names_are_errors(change: dict[str, str], match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        replace(Query(), **change).plan()  # type: ignore[arg-type]


ANY = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 70000)
SIZE = st.integers(0, 40000) | st.integers(0, 2**31 - 1)


@given(values=st.tuples(ANY, ANY, ANY, ANY, ANY, ANY, ANY), capability=ANY, multiprocessors=ANY)
def test_no_numbers_crash_it(
    values: tuple[int, int, int, int, int, int, int], capability: int, multiprocessors: int
) -> None:
    """Nonsense is answered: by a reason, or by a RuntimeError, never by a signal or by nonsense."""
    try:
        text = torch.ops.epigemm._plan_linear(
            "bias", *values, "bfloat16", "ieee", capability, multiprocessors
        )
    except RuntimeError:
        return
    plan = json.loads(text)
    assert plan["fused"] or plan["why_not"]
    if min(values[:3]) < 1:
        assert not plan["fused"]


@given(
    m=SIZE,
    n=SIZE,
    k=SIZE,
    types=st.sampled_from(FUSED_TYPES),
    multiprocessors=st.sampled_from([1, 78, 114, 132]),
)
def test_any_sensible_size_gets_a_sensible_answer(
    m: int, n: int, k: int, types: tuple[str, str], multiprocessors: int
) -> None:
    query = Query(m=m, n=n, k=k, dtype=types[0], arithmetic=types[1], multiprocessors=multiprocessors)
    plan = query.plan()
    if plan["fused"]:
        assert_well_formed(plan, query)
    else:
        assert plan["why_not"]
