"""The planner's argument, for the tests of its answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from epigemm._native import build_info
from epigemm.planner.gpus import KNOWN
from tools.planner import ask_planner

H200 = KNOWN["H200"].numbers[:4]
SWAP_AB, MMA = "sm90_swap_ab", "sm80_mma"


@dataclass(frozen=True)
class Query:
    """A question to the planner: about a large aligned problem on an H200 unless said otherwise.

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
    gpu: tuple[int, ...] = H200
    has_bias: bool = True
    packed: bool = False
    tf32_allowed: bool = False
    invariant: bool = False
    any_family: bool = False

    def plan(self) -> dict[str, Any]:
        given = asdict(self)
        x, weight, out = (given.pop(f"{name}_row_stride") for name in ("x", "weight", "out"))
        least = (self.k if x is None else x, self.k if weight is None else weight)
        return ask_planner(**given, strides=(*least, self.n if out is None else out))


FUSED_TYPES = [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32")]
ALL_TYPES = [*FUSED_TYPES, ("float32", "split"), ("float32", "scaled")]
ROWS = [1, 2, 8, 16, 17, 63, 64, 65, 96, 127, 128, 129, 200, 256, 512, 1000, 1024, 4096, 16384, 100000]
SIZES = [(8192, 8192), (4096, 4096), (512, 1024), (1024, 256), (28672, 8192), (128, 8192), (8192, 64)]
WINS = {
    "fp32 on pieces": Query(dtype="float32", arithmetic="split"),
    "fp32 on pieces, packed": Query(dtype="float32", arithmetic="split", packed=True),
    "TF32": Query(m=16384, k=1024, dtype="float32", arithmetic="tf32"),
    "bf16": Query(m=16384, k=1024),
    "fp16": Query(m=16384, k=1024, dtype="float16"),
}


def tile_size(plan: dict[str, Any]) -> tuple[int, int]:
    m, n, _ = (int(part) for part in plan["tile"].split("x"))
    return m, n


def assert_candidate_well_formed(candidate: dict[str, Any], query: Query) -> None:
    family, tile, raster, swizzle, splits = candidate["plan"]
    families = build_info()["families"]
    assert list(families)[family] == candidate["family"]
    kind = query.arithmetic if query.dtype == "float32" else "16_bits"
    tiles = families[candidate["family"]]
    assert 0 <= tile < tiles[kind] + tiles.get(f"{kind}_as_it_lies", 0)
    assert candidate["reads_weight"] == (tile >= tiles[kind])
    assert ["along_m", "along_n"][raster] == candidate["raster"]
    assert swizzle == candidate["swizzle"] and swizzle in {1, 2, 4, 8}
    assert splits == candidate["splits"]
    divides_k = candidate["family"] in (SWAP_AB, MMA) or candidate["reads_weight"]
    assert splits in ({1, 2, 4, 8} if divides_k else {1})
    assert splits < 8 or tile_size(candidate)[1] < 256, "a long reduction"
    assert splits <= math.ceil(query.k / int(candidate["tile"].split("x")[2])), "a CTA without a part of K"
    assert math.isfinite(candidate["predicted_us"]) and candidate["predicted_us"] > 0


def assert_well_formed(plan: dict[str, Any], query: Query) -> None:
    assert plan["fused"] is True and plan["why_not"] == "" == plan["why_not_covered"]
    assert plan["source"] == "model"
    assert math.isfinite(plan["fallback_us"]) and plan["fallback_us"] > 0
    assert (plan["schedule"] == "swap-AB") == (plan["family"] == SWAP_AB)
    assert_candidate_well_formed(plan, query)
    for candidate in plan["candidates"]:
        assert_candidate_well_formed(candidate, query)
    times = [candidate["predicted_us"] for candidate in plan["candidates"]]
    assert times == sorted(times) and times[0] == plan["predicted_us"], (
        "the pick is not the fastest candidate"
    )
    assert plan["candidates"][0]["plan"] == plan["plan"]
    numbers = [tuple(candidate["plan"]) for candidate in plan["candidates"]]
    assert len(set(numbers)) == len(numbers)


def is_one_kernel(
    m: int, n: int, k: int, dtype: str, tf32_allowed: bool, gpu: tuple[int, ...], epilogue: str = "bias"
) -> bool:
    """What the planner says of such a product on a GPU that is described."""
    answer = ask_planner(epilogue, m, n, k, dtype, "ieee", tf32_allowed=tf32_allowed, gpu=gpu)
    return bool(answer["is_fallback_one_kernel"])
