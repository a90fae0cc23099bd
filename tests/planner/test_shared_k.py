"""CTAs that share the K of a tile in 8 bits: where the planner has them, and where they are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.arguments.calls import EightBits, LinearCall
from epigemm.epilogues.library import FUNCTIONS, gelu_epilogue
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import DryRun
from tests.support import plans
from tests.support.pretended import H200

SUMS = ["promoted", "fast", "blocks"]


def call_of(
    m: int, n: int, k: int, sums: str, *, is_pair: bool = False, invariant: bool = False
) -> LinearCall:
    """A product on the meta device."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = (meta(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
    blocks = (meta(m, math.ceil(k / 128)), meta(math.ceil(n / 128), math.ceil(k / 128)))
    accumulate = "fast" if sums == "fast" else "promoted"
    scales = EightBits(*(blocks if sums == "blocks" else (meta(m), meta())), torch.bfloat16, accumulate, None)
    epilogue: Any = typed(FUNCTIONS["gated_silu"], [False] * 2) if is_pair else gelu_epilogue("none")
    options: dict[str, Any] = {
        "eight_bits": scales,
        "invariant": invariant,
        "weight2": weight if is_pair else None,
    }
    return LinearCall(epilogue, x, weight, (None,) * (1 + is_pair), accumulate, False, **options)


def run(*about: Any, plan: tuple[int, ...] = (), **flags: Any) -> DryRun:
    return dry_runs.dry_run(call_of(*about, **flags), gpu=H200, plan=plan, tried=not plan)


def forced(tile: int, splits: int, *about: Any, **flags: Any) -> DryRun:
    sums = "fast" if "fast" in about else "promoted"
    numbers = plans.numbers(plans.TMA, tile, 0, 8, splits)
    return run(*about, plan=(dry_runs.ARITHMETICS.index(sums), *numbers), **flags)


@pytest.mark.parametrize("sums", SUMS)
def test_few_tiles_share_a_long_k(sums: str) -> None:
    """As many CTAs as run at once, each with 512 of K or more."""
    counts = set()
    for m, n, k in [
        (114, 1232, 8816),
        (69, 3120, 6144),
        (16, 1024, 16384),
        (128, 512, 16384),
        (32, 1024, 8192),
    ]:
        plan = run(m, n, k, sums).tried[0].plan
        rows, columns, _ = (int(each) for each in plan["tile"].split("x"))
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        assert tiles * plan["splits"] <= (132 if plan["splits"] < 4 else 120) or plan["splits"] == 1
        assert k >= 512 * plan["splits"] or plan["splits"] == 1
        counts.add(plan["splits"])
    assert len(counts) > 1 and max(counts) > 1
    for m, n, k in [(16, 1024, 1000), (4096, 4096, 4096), (64, 16384, 16384)]:
        assert run(m, n, k, sums).plan[-1] == 1, "tiles are enough, or K is short"


@pytest.mark.parametrize("sums", SUMS)
def test_a_batch_invariant_call_shares_nothing(sums: str) -> None:
    found = {run(m, 512, 16384, sums, invariant=True).plan for m in (1, 16, 128, 4096)}
    assert len(found) == 1 and found.pop()[-1] == 1


@pytest.mark.parametrize("sums", SUMS)
def test_forced_plans(sums: str) -> None:
    alone, of_a_cluster = 1, 0
    for splits in (2, 4, 8):
        found = forced(alone, splits, 64, 1024, 2048, sums)
        assert found.fused and found.plan[-1] == splits and not found.refused
        assert forced(of_a_cluster, splits, 64, 1024, 2048, sums).refused == (
            f"plan: splits must be 1 in this tile, got {splits}"
        )
    assert forced(alone, 4, 64, 1024, 384, sums).refused == (
        "plan: K = 384 has fewer stages of 128 than the 4 CTAs that share it"
    )
    assert forced(alone, 4, 64, 1024, 400, sums).fused


def test_other_kernels_share_nothing() -> None:
    pair = forced(0, 2, 64, 1024, 2048, "promoted", is_pair=True)
    assert pair.refused == "plan: splits must be 1 in this tile, got 2"
    halves = [torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta") for rows in (64, 1024)]
    call = LinearCall(gelu_epilogue("none"), halves[0], halves[1], (None,))
    cooperative = 6
    found = dry_runs.dry_run(call, gpu=H200, plan=(0, *plans.numbers(plans.TMA, cooperative, 0, 8, 2)))
    assert found.refused == "plan: splits must be 1 in this tile, got 2"
