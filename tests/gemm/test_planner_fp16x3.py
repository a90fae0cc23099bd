"""The planner on fp32 products of fp16 slices: clear choices, exact reasons, properties of any cost model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epigemm.planner import plans
from tests.support.cases import ELEMENTWISE, LINEAR

H200 = (90, 132, 1980, 4285000)  # compute capability, multiprocessors, MHz, bytes a microsecond
MAIN = (1024, 8192, 8192)
SPLIT, SCALED = "split", "scaled"


def ask(
    m: int,
    n: int,
    k: int,
    arithmetic: str = SPLIT,
    *,
    epilogue: str = "relu_div",
    packed: bool = True,
    tf32_allowed: bool | None = None,
    gpu: tuple[int, ...] = H200,
) -> dict[str, Any]:
    allowed = arithmetic == SCALED if tf32_allowed is None else tf32_allowed
    sizes = (epilogue, m, n, k, "float32", arithmetic)
    return plans.ask(*sizes, packed=packed, tf32_allowed=allowed, gpu=gpu)


# What was fastest in a sweep over all plans on an H200, by a wide margin: few rows, and many.
PICKS = [
    ((16, 8192, 8192), "16x128x64"),
    (MAIN, "128x128x64"),
    ((4096, 4096, 4096), "128x128x64"),
    ((16384, 4096, 4096), "128x128x64"),
]


@pytest.mark.parametrize(("shape", "tile"), PICKS, ids=str)
def test_clear_picks(shape: tuple[int, int, int], tile: str) -> None:
    plan = ask(*shape)
    assert plan["fused"] and plan["tile"] == tile and plan["family"] == "sm90_fp16x3"


@pytest.mark.parametrize("epilogue", LINEAR)
@pytest.mark.parametrize(
    ("arithmetic", "m"), [(SPLIT, 1024), *((each, m) for each in (SPLIT, SCALED) for m in (4096, 16384))]
)
def test_large_problems_run_on_pieces_even_without_a_pack(epilogue: str, arithmetic: str, m: int) -> None:
    plan = ask(m, 8192, 8192, arithmetic, epilogue=epilogue, packed=False)
    assert plan["fused"] and plan["why_not"] == ""
    assert plan["predicted_us"] < plan["fallback_us"]


def test_the_baseline_is_what_torch_may_use() -> None:
    """A call that would do with TF32 is compared with SGEMM where torch's setting allows no TF32."""
    allowed, kept = (ask(*MAIN, SCALED, tf32_allowed=allowed) for allowed in (True, False))
    assert allowed["predicted_us"] == kept["predicted_us"]
    assert kept["fallback_us"] == ask(*MAIN)["fallback_us"] > 3 * allowed["fallback_us"]


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"k": 127}, "K = 127 is below 128"),
    ({"m": 15}, "M = 15 is below 16"),
    ({"arithmetic": SCALED, "k": 15}, "K = 15 is outside 16..8192"),
    ({"arithmetic": SCALED, "k": 8193}, "K = 8193 is outside 16..8192"),
    ({"m": 0}, "empty"),
    ({"m": 2**31}, "M and N must be at most"),
    ({"k": 2**28}, "K at most"),
    ({"gpu": (75, 40)}, "(Ampere)"),
    ({"m": 16, "n": 512, "k": 512}, "expected to be at least as fast"),
]


@pytest.mark.parametrize(("changed", "words"), REASONS, ids=str)
def test_reasons(changed: dict[str, Any], words: str) -> None:
    plan = ask(**{"m": 1024, "n": 8192, "k": 8192, **changed})
    assert not plan["fused"] and words in plan["why_not"]


@pytest.mark.parametrize("epilogue", sorted(set(ELEMENTWISE) - set(LINEAR)))
def test_only_linear_epilogues(epilogue: str) -> None:
    assert "no GEMM kernels" in ask(1024, 8192, 8192, epilogue=epilogue)["why_not"]


def test_a_pack_is_recommended_where_it_decides() -> None:
    """At so few rows splitting the weight takes longer than the product."""
    rows = next(
        m for m in range(1, 1024) if ask(m, 4096, 4096)["fused"] > ask(m, 4096, 4096, packed=False)["fused"]
    )
    assert "see pack" in ask(rows, 4096, 4096, packed=False)["why_not"]


@pytest.mark.parametrize("k", [127, 1])
def test_a_k_outside_the_accuracys_limits_can_be_run(k: int) -> None:
    """By force, or for a batch-invariant call that has nothing else."""
    for invariant in (False, True):
        sizes = ("bias", 1024, 8192, k, "float32", SPLIT)
        plan = plans.ask(*sizes, packed=True, invariant=invariant, gpu=H200)
        assert not plan["fused"] and plan["why_not_covered"] == ""
        assert plan["why_not"] == (
            f"K = {k} is below 128, from where on the split's error is below that of an IEEE fp32 product"
        )


@pytest.mark.parametrize("m", [1, 15])
def test_few_rows_run_on_pieces_where_m_may_not_decide(m: int) -> None:
    plan = plans.ask("bias", m, 8192, 8192, "float32", SPLIT, packed=True, invariant=True, gpu=H200)
    assert plan["fused"] and plan["why_not"] == ""


def test_layouts_play_no_part() -> None:
    """The slices are laid out by us: odd sizes and strides, any alignment."""
    sizes = ("bias", 1023, 8191, 8193, "float32", SPLIT)
    aligned, odd = (
        plans.ask(*sizes, packed=True, strides=strides, alignment=alignment, gpu=H200)
        for strides, alignment in ((None, 256), ((8195, 9001, 8191), 4))
    )
    assert aligned["fused"] and odd["plan"] == aligned["plan"]


sizes = st.integers(1, 40000)


@given(m=sizes, n=sizes, k=sizes, arithmetic=st.sampled_from([SPLIT, SCALED]), packed=st.booleans())
def test_any_size_gets_a_plan_or_a_reason(m: int, n: int, k: int, arithmetic: str, packed: bool) -> None:
    plan = ask(m, n, k, arithmetic, packed=packed)
    assert plan["fused"] == (plan["why_not"] == "")
    assert plan["source"] == "model" and plan["why_not_covered"] == ""
    times = [candidate["predicted_us"] for candidate in plan["candidates"]]
    assert times == sorted(times) and all(math.isfinite(time) and time > 0 for time in times)
    for candidate in plan["candidates"]:
        tile_m = int(candidate["tile"].split("x")[0])
        assert tile_m >= 64 or m <= 2 * tile_m, "the weight would stream by more than twice"
    if not packed and times:
        kept = [candidate["predicted_us"] for candidate in ask(m, n, k, arithmetic)["candidates"]]
        assert kept[0] < times[0], "splitting the weight costs time"
    if plan["fused"]:
        assert times[0] == plan["predicted_us"] <= plan["fallback_us"]
