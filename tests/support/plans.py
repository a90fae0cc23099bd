"""Plans as the native operators take them: family, tile, raster, swizzle and splits."""

from __future__ import annotations

from epigemm._native import build_info

TMA, SWAP_AB, FP16X3 = "sm90_tma", "sm90_swap_ab", "sm90_fp16x3"
MMA, FEW_ROWS = "sm80_mma", "sm90_few_rows"

FAMILIES: dict[str, dict[str, int]] = build_info()["families"]
"""How many tiles each family has: of "16_bits", "tf32", "split" and "scaled" those that it multiplies in, and
of "pairs" of products. The first tiles for 16 bits are those for TF32."""


ON_COPIES = [
    ((8193, 256, 255), "contiguous", 1),
    ((1024, 1023, 1023), "contiguous", 2),
    ((8192, 3072, 768), "transposed", 1),
]
"""M, N, K, and the weight's layout of 16-bit products that Hopper's planner runs fused, with so many launches of
copies: bias and GELU, each predicted to win by a quarter at least."""


def numbers(family: str, tile: int = 0, raster: int = 0, swizzle: int = 1, splits: int = 1) -> list[int]:
    """The plan by its family's name."""
    return [list(FAMILIES).index(family), tile, raster, swizzle, splits]


def tile_count(family: str, arithmetic: str) -> int:
    """How many tiles this build can launch: none without the GEMM kernels."""
    return FAMILIES[family].get(arithmetic, 0) if build_info()["gemm_kernels"] else 0
