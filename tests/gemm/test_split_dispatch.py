"""Dispatch of fp32 products on fp16 pieces: expected picks, exact reasons, properties that any cost model must keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epigemm import plans
from tests.support.cases import ELEMENTWISE, LINEAR

H200 = (90, 132)  # compute capability, multiprocessors
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
    device: tuple[int, int] = H200,
) -> dict[str, Any]:
    allowed = arithmetic == SCALED if tf32_allowed is None else tf32_allowed
    return plans.ask(epilogue, m, n, k, packed, arithmetic, allowed, *device)


# What was fastest in a sweep over all plans on an H200.
PICKS = [
    ((1, 8192, 8192), "16x128x64"),
    ((16, 8192, 8192), "16x128x64"),
    ((16, 4096, 4096), "16x128x64"),
    ((24, 8192, 8192), "64x128x64"),
    ((32, 4096, 4096), "64x128x64"),
    ((64, 8192, 8192), "64x128x64"),
    ((64, 4096, 11008), "64x128x64"),
    ((64, 11008, 4096), "64x128x64"),
    ((80, 8192, 8192), "128x64x64"),
    ((96, 4096, 4096), "128x64x64"),
    ((128, 8192, 8192), "128x64x64"),
    ((256, 8192, 8192), "128x128x64"),
    ((1024, 8192, 8192), "128x128x64"),
    ((4096, 4096, 4096), "128x128x64"),
    ((16384, 4096, 4096), "128x128x64"),
]


@pytest.mark.parametrize(("shape", "tile"), PICKS, ids=str)
def test_picks(shape: tuple[int, int, int], tile: str) -> None:
    plan = ask(*shape)
    assert plan["fused"] and plan["tile"] == tile


@pytest.mark.parametrize("epilogue", LINEAR)
@pytest.mark.parametrize("arithmetic", [SPLIT, SCALED])
@pytest.mark.parametrize("m", [1024, 4096, 16384])
def test_large_problems_run_on_pieces_even_without_a_pack(epilogue: str, arithmetic: str, m: int) -> None:
    plan = ask(m, 8192, 8192, arithmetic, epilogue=epilogue, packed=False)
    assert plan["fused"] and plan["why_not"] == ""
    assert plan["predicted_us"] < plan["second_path_us"]


def test_the_rival_is_what_torch_may_use() -> None:
    """A call that would do with TF32 is compared with SGEMM where torch's setting allows no TF32."""
    shape = (1024, 8192, 8192)
    allowed, kept = (ask(*shape, SCALED, tf32_allowed=allowed) for allowed in (True, False))
    assert allowed["predicted_us"] == kept["predicted_us"]
    assert kept["second_path_us"] == ask(*shape)["second_path_us"] > 3 * allowed["second_path_us"]


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"k": 127}, "K = 127 is below 128"),
    ({"arithmetic": SCALED, "k": 15}, "K = 15 is outside 16..8192"),
    ({"arithmetic": SCALED, "k": 8193}, "K = 8193 is outside 16..8192"),
    ({"m": 0}, "empty"),
    ({"m": 2**31}, "M and N must be at most"),
    ({"k": 2**28}, "K at most"),
    ({"device": (80, 108)}, "(Hopper)"),
    ({"device": (100, 148)}, "(Hopper)"),
    ({"m": 1, "n": 512, "k": 512}, "expected to be faster"),
    ({"m": 64, "n": 1024, "k": 4096}, "expected to be faster"),
    ({"m": 64, "packed": False}, "see pack"),
]


@pytest.mark.parametrize(("changed", "words"), REASONS, ids=str)
def test_reasons(changed: dict[str, Any], words: str) -> None:
    plan = ask(**{"m": 1024, "n": 8192, "k": 8192, **changed})
    assert not plan["fused"] and words in plan["why_not"]


@pytest.mark.parametrize("epilogue", sorted(set(ELEMENTWISE) - set(LINEAR)))
def test_only_linear_epilogues(epilogue: str) -> None:
    assert "no GEMM kernels" in ask(1024, 8192, 8192, epilogue=epilogue)["why_not"]


sizes = st.integers(1, 40000)


@given(m=sizes, n=sizes, k=sizes, arithmetic=st.sampled_from([SPLIT, SCALED]), packed=st.booleans())
def test_any_size_gets_a_plan_or_a_reason(m: int, n: int, k: int, arithmetic: str, packed: bool) -> None:
    plan = ask(m, n, k, arithmetic, packed=packed)
    assert plan["fused"] == (plan["why_not"] == "")
    assert plan["source"] == "model"
    if not plan["fused"]:
        return
    times = [candidate["predicted_us"] for candidate in plan["candidates"]]
    assert times == sorted(times) and times[0] == plan["predicted_us"]
    assert math.isfinite(times[-1]) and plan["predicted_us"] <= plan["second_path_us"]
    tile_m = int(plan["tile"].split("x")[0])
    assert tile_m >= 64 or m <= tile_m, "the weight would stream by more than once"
    if not packed:
        assert ask(m, n, k, arithmetic)["predicted_us"] < plan["predicted_us"], (
            "splitting the weight costs time"
        )
