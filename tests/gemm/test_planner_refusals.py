"""What the planner refuses, and with which words; no argument crashes it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gemm.query import (
    ALL_TYPES,
    TINY,
    WINS,
    Query,
    assert_well_formed,
)
from tests.support.cases import ELEMENTWISE, LINEAR

TF32: dict[str, Any] = {"dtype": "float32", "arithmetic": "tf32"}
REFUSED: list[tuple[str, Query, list[str]]] = [
    ("fp64", Query(dtype="float64"), ["float64"]),
    ("ieee fp32", Query(dtype="float32", arithmetic="ieee"), ["IEEE fp32"]),
    ("before Ampere", Query(gpu=(75, 40)), ["9.0", "8.0", "7.5"]),
    ("not a CUDA device", Query(gpu=(0, 1)), ["CUDA"]),
    ("odd K", Query(k=8191, **TF32), ["8191", "16 bytes"]),
    ("odd N", Query(n=8191, **TF32), ["8191", "16 bytes"]),
    ("K of 6 elements in TF32", Query(k=6, **TF32), ["6", "16 bytes"]),
    ("misaligned pointer", Query(alignment=8, **TF32), ["aligned to 8 bytes", "16"]),
    ("odd stride of x", Query(x_row_stride=8193, **TF32), ["x", "8193"]),
    ("odd stride of weight", Query(weight_row_stride=8193, **TF32), ["weight", "8193"]),
    ("odd stride of out", Query(out_row_stride=8193, **TF32), ["out", "8193"]),
    ("odd K, batch invariant", Query(k=8191, invariant=True), ["8191", "16 bytes"]),
    ("odd N, batch invariant", Query(n=8191, invariant=True), ["8191", "16 bytes"]),
    ("misaligned, batch invariant", Query(alignment=8, invariant=True), ["aligned to 8 bytes", "16"]),
    ("odd K, batch invariant, TF32", Query(k=8191, invariant=True, **TF32), ["8191", "16 bytes"]),
    ("rows of x that overlap", Query(x_row_stride=8, k=12), ["rows of x overlap"]),
    ("no rows", Query(m=0), ["empty", "M = 0"]),
    ("no columns", Query(n=0), ["empty", "N = 0"]),
    ("no K", Query(k=0), ["empty", "K = 0"]),
]


@pytest.mark.parametrize(
    ("query", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_why_not(query: Query, words: list[str]) -> None:
    plan = query.plan()
    assert plan["fused"] is False and plan["candidates"] == []
    assert plan["why_not"] == plan["why_not_covered"], "no kernel can run it"
    for word in words:
        assert word in plan["why_not"], plan["why_not"]


@pytest.mark.parametrize("changed", [
    {"k": 8191}, {"n": 8191}, {"k": 44}, {"alignment": 8}, {"alignment": 2}, {"x_row_stride": 8193},
    {"weight_row_stride": 8193}, {"out_row_stride": 8193},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_are_no_whole_16_bytes_are_read_by_elements(changed: dict[str, int], dtype: str) -> None:
    """In 16 bits; whether that gains is a matter of times."""
    plan = Query(**{"m": 16384, **changed}, dtype=dtype).plan()  # type: ignore[arg-type]
    assert plan["why_not_covered"] == ""
    assert {(each["family"], each["schedule"]) for each in plan["candidates"]} == {
        ("sm80_mma", "by elements")
    }
    assert plan["fused"] or "against" in plan["why_not"]


@pytest.mark.parametrize(
    ("query", "why_not"),
    [
        (
            Query(gpu=(75, 40)),
            "fused kernels exist for compute capability 9.0 (Hopper); this device has 7.5; mma.sync kernels exist from "
            "compute capability 8.0 (Ampere) on; this device has 7.5",
        ),
        (
            Query(alignment=8, **TF32),
            "x, weight or out starts at an address aligned to 8 bytes; fused kernels need 16",
        ),
        (
            Query(k=8191, **TF32),
            "K = 8191 elements are 32764 bytes; fused kernels need rows of a multiple of 16 bytes",
        ),
        (
            Query(dtype="float64"),
            "fused kernels exist for float16, bfloat16 and float32 (as TF32), not for float64",
        ),
        (Query(epilogue="sigmoid"), "epilogue 'sigmoid' has no GEMM kernels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_several_families_refuse_is_said_once(query: Query, why_not: str) -> None:
    assert query.plan()["why_not"] == why_not


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (Query(dtype="float32", arithmetic="tf32", k=200_000), "less accurate than cuBLAS"),
        (Query(dtype="float32", arithmetic="split", k=127), "K = 127 is below 128"),
        (TINY, "expected to be at least as fast"),
    ],
    ids=["long sums", "short sums", "slower"],
)
def test_what_a_kernel_can_run_is_told_apart(query: Query, words: str) -> None:
    """Forced or batch-invariant it runs though the planner would not take it."""
    plan = query.plan()
    assert not plan["fused"] and words in plan["why_not"] and plan["why_not_covered"] == ""


@pytest.mark.parametrize("epilogue", [name for name in ELEMENTWISE if name not in LINEAR])
def test_elementwise_only_epilogues_have_no_fused_kernel(epilogue: str) -> None:
    plan = Query(epilogue=epilogue).plan()
    assert plan["fused"] is False and epilogue in plan["why_not"]


def test_a_reason_names_the_first_obstacle_only_when_there_is_one() -> None:
    plan = WINS["bf16"].plan()
    assert plan["why_not"] == plan["why_not_covered"] == ""


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
    multiprocessors=st.sampled_from([1, 78, 114, 132]),
    packed=st.booleans(),
)
def test_any_sensible_size_gets_a_sensible_answer(
    m: int, n: int, k: int, types: tuple[str, str], multiprocessors: int, packed: bool
) -> None:
    gpu = (90, multiprocessors)
    query = Query(m=m, n=n, k=k, dtype=types[0], arithmetic=types[1], gpu=gpu, packed=packed)
    plan = query.plan()
    if plan["fused"]:
        assert_well_formed(plan, query)
    else:
        assert plan["why_not"]
    assert plan["why_not"] or not plan["why_not_covered"]
