"""What cuBLAS is expected to do and to take: where a bias is a kernel of its own, and where rows are no whole 16 bytes.

The rule that it splits K: csrc/gemm/planner/fallback.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from epigemm.planner import plans
from tests.gemm.query import H200 as GPU
from tests.gemm.query import is_one_kernel
from tools.planner import ask_planner

H200, SMALL = 132, 40
Sizes = tuple[int, int, int]


class Rule(NamedTuple):
    """Of a dtype, torch's setting and a number of multiprocessors: M, N, K at the limits.

    Inside the bias comes in a kernel of its own, outside with the product.
    """

    dtype: str
    tf32: bool
    multiprocessors: int
    inside: list[Sizes]
    outside: list[Sizes]


RULES = {
    # Below 3 * 132 = 396 tiles, aligned or not; fewer rows where there are few columns too; one row or three where
    # both sides of the weight are long.
    "plain fp32": Rule(
        "float32",
        False,
        H200,
        [
            *((16, 395 * 128, 512), (395 * 128, 2, 512), (8, 1000, 512), (8, 1, 512), (8, 999, 513)),
            *((m, n, 512) for m in (2, 3, 7) for n in (1, 999)),
            *((m, n, k) for m in (1, 3) for n in (8000, 500 * 128) for k in (6000, 6001)),
        ],
        [
            *((16, 395 * 128 + 1, 512), (395 * 128 + 1, 2, 512), (8, 1000, 511), (7, 999, 511)),
            *((2, 1000, 512), (7, 1000, 100_000), (1, 1, 512), (1, 999, 512)),
            *((m, n, k) for m in (1, 3) for n, k in ((7999, 6000), (8000, 5999))),
            *((m, 8000, 6000) for m in (2, 4, 7)),
        ],
    ),
    "plain fp32, a small GPU": Rule(
        "float32", False, SMALL, [(8, 119 * 128, 512), (1, 500 * 128, 6000)], [(8, 120 * 128, 512)]
    ),
    # Three tiles for each of two multiprocessors.
    "plain fp32, a tiny GPU": Rule("float32", False, 2, [(7, 5 * 128, 512)], [(7, 5 * 128 + 1, 512)]),
    # 0.15 * 132 = 19.8 tiles; any number for 33 to 64 rows, where K is longer and columns are not too many.
    "TF32": Rule(
        "float32",
        True,
        H200,
        [
            *((16, 19 * 128, 4096), (19 * 128, 4, 4096), (1, 4, 4096), (128, 128, 100_000)),
            *((m, n, 8196) for m in (33, 64) for n in (20 * 128, 12000)),
        ],
        [
            *((16, 19 * 128 + 4, 4096), (129, 10 * 128, 4096), (16, 19 * 128, 4092), (19 * 128 + 1, 4, 4096)),
            *((m, 12000, 8196) for m in (32, 65)),
            *((m, n, k) for m in (33, 64) for n, k in ((12004, 8196), (12000, 8192))),
        ],
    ),
    "TF32, a small GPU": Rule(
        "float32", True, SMALL, [(16, 5 * 128, 4096), (33, 12000, 8196)], [(16, 6 * 128, 4096)]
    ),
    # Below 132 tiles, whichever side is not whole 16 bytes; every remainder counts.
    "misaligned TF32": Rule(
        "float32",
        True,
        H200,
        [
            *((17, 131 * 128 - 1, 700), (131 * 128, 4, 701), (11 * 128, 11 * 128 - 1, 8192)),
            *((17, 8192 + i, 700) for i in (1, 2, 3)),
            *((17, 8192, 700 + i) for i in (1, 2, 3)),
        ],
        [
            *((17, 131 * 128 + 1, 700), (131 * 128 + 1, 4, 701), (12 * 128, 11 * 128 - 1, 8192)),
            *((17, 8191, 699), (17, 8192, 700), (16, 8191, 700), (16, 8191, 100_000)),
        ],
    ),
    "misaligned TF32, a small GPU": Rule(
        "float32", True, SMALL, [(17, 39 * 128 - 1, 700)], [(17, 39 * 128 + 1, 700)]
    ),
    # Rows that begin off 64 bytes: K is a multiple of 8 and none of 32.
    "16 bits": Rule(
        "16 bits",
        False,
        H200,
        [
            *((m, n, 8200) for m in (129, 512) for n in (8, 8192, 500 * 128)),
            *((129, 8192, 8208), (512, 8192, 8216), (512, 16384, 100_008)),
        ],
        [
            *((16, 8192, 8192), (16, 8, 512), (128, 128, 100_000), (17, 131 * 128, 100_000)),
            *((m, n, 8200) for m in (1, 128, 513) for n in (8, 8192, 500 * 128)),
            *((512, 8192, k) for k in (8184, 8192, 8224, 8256)),
        ],
    ),
    "16 bits, a small GPU": Rule("16 bits", False, SMALL, [(129, 8192, 8200)], [(128, 8192, 8200)]),
    # Below 2 * 132 = 264 tiles, whichever side is not whole 16 bytes; every remainder counts.
    "misaligned 16 bits": Rule(
        "16 bits",
        False,
        H200,
        [
            *((2, 263 * 128 - 1, 512), (263 * 128, 8, 513), (2, 8, 519), (9 * 128, 29 * 128 - 1, 512)),
            (11, 5349, 3280),  # in bf16 `_addmm_activation` has more than twice eager's error here
            *((2, 8192 + i, 512) for i in range(1, 8)),
            *((2, 8192, 512 + i) for i in range(1, 8)),
        ],
        [
            *((2, 263 * 128 + 1, 512), (263 * 128 + 1, 8, 513), (11 * 128, 24 * 128 - 1, 512)),
            *((2, 8191, 511), (2, 8191, 504), (2, 8192, 511), (2, 8192, 512), (1, 8191, 512)),
        ],
    ),
    "misaligned 16 bits, a small GPU": Rule(
        "16 bits", False, SMALL, [(2, 79 * 128 - 1, 512)], [(2, 79 * 128 + 1, 512)]
    ),
    "float64": Rule("float64", False, H200, [], [(16, 8191, 8191), (16, 8192, 8192)]),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_where_a_bias_comes_in_a_kernel_of_its_own(rule: Rule) -> None:
    """An empty product is never split; nothing is known of cuBLAS without a GPU."""
    gpu, empty = (90, rule.multiprocessors), [(0, 8191, 8191), (16, 0, 8191), (16, 8191, 0)]
    for dtype in ("float16", "bfloat16") if rule.dtype == "16 bits" else (rule.dtype,):
        for sizes in rule.inside:
            assert not is_one_kernel(*sizes, dtype, rule.tf32, gpu), (dtype, sizes)
            assert is_one_kernel(*sizes, dtype, rule.tf32, ())
        for sizes in (*rule.outside, *empty):
            assert is_one_kernel(*sizes, dtype, rule.tf32, gpu), (dtype, sizes)


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
