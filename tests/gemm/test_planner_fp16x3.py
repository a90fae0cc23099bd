"""The planner on fp32 products of fp16 slices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.gemm.query import Query, tile_size

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
