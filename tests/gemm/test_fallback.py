"""What cuBLAS is expected to do and to take: where a bias is a kernel of its own, and where rows are no whole 16 bytes.

The rule that it splits K: csrc/gemm/planner/fallback.cpp.
"""

from __future__ import annotations

import pytest
import torch

from epigemm.planner import plans
from tests.gemm.query import H200 as GPU
from tools.planner import ask_planner

Sizes = tuple[int, int, int]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "expected"),
    [((16, 8192, 8192), False), ((2, 8192, 8192), True), ((16, 8192, 256), True), ((4096, 4096, 4096), True)],
    ids=["few tiles, long K", "two rows", "short K", "tiles for all multiprocessors"],
)
def test_a_plain_fp32_product_that_splits_k_comes_without_the_bias(shape: Sizes, expected: bool) -> None:
    """As measured on an H200, by a wide margin: 202 us with the bias at 16x8192x8192, 151 without."""
    if not torch.cuda.is_available():
        pytest.skip("gpu: torch sees no CUDA device")
    answer = ask_planner("bias", *shape, "float32", "ieee", device=0)
    assert answer["is_fallback_one_kernel"] is expected


H100 = (90, 132, 1980, 3028000)
SEEN = [
    # M, N, K, GPU, us in 16 bits with bias and ReLU: benchmarks/results, random-51 and random-52
    *((5382, 3103, 5944, H100, 2195), (5382, 3103, 5944, GPU, 2201), (15, 13397, 10888, GPU, 291)),
    *((723, 5096, 10535, H100, 711), (106, 6547, 13592, H100, 256), (16, 1408, 7463, GPU, 33)),
    *((516, 496, 5575, GPU, 75), (20, 13408, 147, GPU, 12), (1962, 13424, 2374, H100, 647)),
    *((2621, 13648, 7006, GPU, 2296), (17, 12672, 12020, GPU, 152), (666, 6140, 416, GPU, 35)),
]


def fallback_us(m: int, n: int, k: int, gpu: tuple[int, ...] = GPU, **layout: object) -> float:
    answer = ask_planner("bias_relu", m, n, k, "bfloat16", "ieee", gpu=gpu, **layout)  # type: ignore[arg-type]
    return plans.fallback_us(answer)


@pytest.mark.parametrize(("m", "n", "k", "gpu", "seen"), SEEN)
def test_what_was_measured(m: int, n: int, k: int, gpu: tuple[int, ...], seen: float) -> None:
    assert 0.8 * seen < fallback_us(m, n, k, gpu) < 1.25 * seen
