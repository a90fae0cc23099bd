"""No argument crashes the planner. What it refuses, and with which words: tests/net/explanations.txt."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gemm.query import ALL_TYPES, H200, Query, assert_well_formed

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
