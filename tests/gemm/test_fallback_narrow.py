"""What cuBLAS is predicted to take in 16 bits where some rows are no whole 16 bytes, against what was measured."""

from __future__ import annotations

import pytest

from epigemm.planner import plans

H200, H100 = (90, 132, 1980, 4285000), (90, 132, 1980, 3028000)
SEEN = [
    # M, N, K, GPU, us with bias and ReLU: benchmarks/results, random-51 and random-52
    (5382, 3103, 5944, H100, 2195), (5382, 3103, 5944, H200, 2201), (15, 13397, 10888, H200, 291),
    (723, 5096, 10535, H100, 711), (14, 10461, 3936, H200, 76), (106, 6547, 13592, H100, 256),
    (16, 1408, 7463, H200, 33), (516, 496, 5575, H200, 75), (20, 13408, 147, H200, 12),
    (209, 8170, 3496, H100, 80), (173, 7640, 2586, H200, 56), (1301, 13000, 5350, H200, 965),
    (1962, 13424, 2374, H100, 647), (2621, 13648, 7006, H200, 2296), (2503, 7798, 9088, H100, 1352),
    (17, 12672, 12020, H200, 152), (666, 6140, 416, H200, 35),
]  # fmt: skip


def fallback_us(m: int, n: int, k: int, gpu: tuple[int, ...], **layout: object) -> float:
    answer = plans.ask("bias_relu", m, n, k, "bfloat16", "ieee", gpu=gpu, **layout)  # type: ignore[arg-type]
    return plans.fallback_us(answer)


@pytest.mark.parametrize(("m", "n", "k", "gpu", "seen"), SEEN)
def test_what_was_measured(m: int, n: int, k: int, gpu: tuple[int, ...], seen: float) -> None:
    assert 0.8 * seen < fallback_us(m, n, k, gpu) < 1.25 * seen


def test_whatever_is_narrow() -> None:
    """K, N, a stride or an address, by single elements or by pairs; not a vector, whose kernel is another."""
    wide = fallback_us(2048, 2048, 2048, H200)
    for single in (
        fallback_us(2048, 2048, 2048, H200, alignment=2),
        fallback_us(2048, 2048, 2048, H200, strides=(2049, 2048, 2048)),
        fallback_us(2048, 2048, 2048, H200, strides=(2048, 2049, 2048)),
        fallback_us(2048, 2048, 2048, H200, strides=(2048, 2048, 2049)),
        fallback_us(2048, 2048, 2047, H200),
        fallback_us(2048, 2047, 2048, H200),
    ):
        assert single > 4 * wide
    for pairs in (fallback_us(2048, 2048, 2046, H200), fallback_us(2048, 2044, 2048, H200, alignment=4)):
        assert 2 * wide < pairs < 4 * wide
    assert fallback_us(1, 2048, 2047, H200) < 2 * fallback_us(1, 2048, 2048, H200)
