"""What the planner refuses, and with which words; no argument crashes it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gemm.query import ALL_TYPES, H200, TINY, Query, assert_well_formed
from tests.support.cases import ELEMENTWISE, LINEAR

TF32: dict[str, Any] = {"dtype": "float32", "arithmetic": "tf32"}
SPLIT = Query(m=1024, dtype="float32", arithmetic="split", packed=True)
SCALED = replace(SPLIT, arithmetic="scaled", tf32_allowed=True)
A100 = (80, 108, 1410, 1555000)
BEFORE_AMPERE = (
    "fused kernels exist for compute capability 9.0 (Hopper); this device has 7.5; mma.sync kernels exist from "
    "compute capability 8.0 (Ampere) on; this device has 7.5"
)
NOT_COVERED: list[tuple[Query, str]] = [
    (
        Query(dtype="float64"),
        "fused kernels exist for float16, bfloat16 and float32 (as TF32), not for float64",
    ),
    (Query(dtype="float32", arithmetic="ieee"), "IEEE fp32"),
    (Query(gpu=(75, 40)), BEFORE_AMPERE),
    (replace(SPLIT, gpu=(75, 40)), "(Ampere)"),
    (Query(gpu=(0, 1)), "CUDA"),
    (Query(gpu=()), "the tensors are not on a CUDA device"),
    (
        Query(k=8191, **TF32),
        "K = 8191 elements are 32764 bytes; fused kernels need rows of a multiple of 16 bytes",
    ),
    (Query(n=8191, **TF32), "N = 8191"),
    (Query(k=6, **TF32), "K = 6"),
    (Query(alignment=8, **TF32), "an address aligned to 8 bytes; fused kernels need 16"),
    (Query(x_row_stride=8193, **TF32), "8193"),
    (Query(weight_row_stride=8193, **TF32), "8193"),
    (Query(out_row_stride=8193, **TF32), "8193"),
    (Query(k=8191, invariant=True), "K = 8191"),
    (Query(n=8191, invariant=True), "N = 8191"),
    (Query(alignment=8, invariant=True), "aligned to 8 bytes"),
    (Query(k=8191, invariant=True, **TF32), "K = 8191"),
    (Query(x_row_stride=8, k=12), "rows of x overlap"),
    (Query(x_row_stride=8, gpu=A100), "the rows of x overlap"),
    (Query(m=2**31, gpu=A100), "M, N and K must be at most"),
    (replace(SPLIT, m=2**31), "M and N must be at most"),
    (replace(SPLIT, k=2**28), "K at most"),
    *((replace(query, m=0), "empty") for query in (Query(), SPLIT)),
    (Query(n=0), "N = 0"),
    (Query(k=0), "K = 0"),
    *(
        (Query(epilogue=name), f"epilogue '{name}' has no GEMM kernels")
        for name in ELEMENTWISE
        if name not in LINEAR
    ),
]


@pytest.mark.parametrize(("query", "words"), NOT_COVERED, ids=[words for _, words in NOT_COVERED])
def test_what_no_kernel_can_run(query: Query, words: str) -> None:
    """What several families refuse is said once."""
    plan = query.plan()
    assert plan["fused"] is False and plan["candidates"] == []
    assert plan["why_not"] == plan["why_not_covered"]
    assert words in plan["why_not"], plan["why_not"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (Query(**TF32, k=200_000), "less accurate than cuBLAS"),
        (replace(SPLIT, k=127), "K = 127 is below 128"),
        (replace(SPLIT, m=15), "M = 15 is below 16"),
        (replace(SCALED, k=15), "K = 15 is outside 16..8192"),
        (replace(SCALED, k=8193), "K = 8193 is outside 16..8192"),
        *((replace(query, gpu=A100), words) for query, words in (
            (replace(SPLIT, k=127), "K = 127 is below 128"),
            (replace(SPLIT, m=15), "M = 15 is below 16"),
            (replace(SCALED, k=8193), "K = 8193 is outside 16..8192"),
        )),
        (TINY, "expected to be at least as fast"),
    ],
)  # fmt: skip
def test_what_a_kernel_can_run_is_told_apart(query: Query, words: str) -> None:
    """Forced or batch-invariant it runs though the planner would not take it."""
    plan = query.plan()
    assert not plan["fused"] and words in plan["why_not"] and plan["why_not_covered"] == ""


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
    ("changed", "words"),
    [
        ({"epilogue": "no_such"}, "no_such"),
        ({"dtype": "int8"}, "int8"),
        ({"arithmetic": "tf33"}, "tf33"),
        *(
            ({"gpu": gpu}, "gpu must be empty or")
            for gpu in ((90,), (90, 132, 1980), (90, 132, 1980, 4285000, 1))
        ),
        *(
            ({"gpu": gpu}, "gpu must be empty or")
            for gpu in ((80, 108, 1, 1, 1, 1, 1), (80, 108, 1, 1, 1, 1, 0, 5))
        ),
        *(
            ({"gpu": (90, count)}, f"multiprocessors must be in 1..65536, got {count}$")
            for count in (0, -1, 65537, 2**32 + 132)
        ),
    ],
    ids=str,
)
def test_what_there_is_not_is_an_error(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        replace(Query(), **changed).plan()


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
