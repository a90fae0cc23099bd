"""What the planner knows of a GPU, held against what NVIDIA publishes of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from epigemm.planner.gpus import KNOWN
from tools.planner import ask_planner

A100, GA102 = "A100 Tensor Core GPU Architecture", "Ampere GA102 GPU Architecture"
ADA, BLACKWELL = "Ada GPU Architecture", "RTX Blackwell GPU Architecture"


class Published(NamedTuple):
    """Dense figures in TFLOPS, and where they are from."""

    tensor: float  # fp16 tensor cores with fp32 sums
    fp32: float  # without tensor cores; 0: not held against
    shared_kb: int  # of a thread block: CUDA C++ programming guide, specifications per compute capability
    source: str


PUBLISHED = {
    "A100 40 GB": Published(312, 19.5, 163, f"A100 data sheet, {A100}"),
    "A100 80 GB": Published(312, 19.5, 163, f"A100 data sheet, {A100}"),
    "A30": Published(165, 10.3, 163, "A30 data sheet"),
    "A10": Published(125, 31.2, 99, "A10 data sheet"),
    "A40": Published(149.7, 37.4, 99, "A40 data sheet"),
    "RTX A6000": Published(154.8, 38.7, 99, GA102),
    "RTX 3080": Published(59.5, 29.8, 99, GA102),
    "RTX 3090": Published(71, 35.6, 99, GA102),
    "L4": Published(121, 30.3, 99, "L4 data sheet"),
    "L40S": Published(362.05, 91.6, 99, "L40S data sheet"),
    "RTX 6000 Ada": Published(364.2, 91.1, 99, ADA),
    "RTX 4080": Published(97.5, 48.7, 99, ADA),
    "RTX 4090": Published(165.2, 82.6, 99, ADA),
    # At a boost clock of 1830 MHz; their driver tells 1980.
    "H100": Published(989.4 * 1980 / 1830, 66.9, 227, "H100 Tensor Core GPU Architecture"),
    "H200": Published(989.4 * 1980 / 1830, 66.9, 227, "H200 data sheet"),
    "B200": Published(2250, 0, 227, "DGX B200 data sheet"),
    "RTX PRO 6000": Published(503.8, 126, 99, "RTX PRO Blackwell GPU Architecture"),
    "RTX 5080": Published(112.6, 56.3, 99, BLACKWELL),
    "RTX 5090": Published(209.5, 104.8, 99, BLACKWELL),
}


HUGE = 1 << 15  # of M, N and K: the tensor cores decide, and not memory
EFFICIENCY = 0.9  # of cuBLAS, assumed


def of_cublas(gpu: tuple[int, ...], dtype: str = "bfloat16", size: int = HUGE) -> float:
    """The TFLOPS at which the planner expects PyTorch's GEMM to compute."""
    arithmetic = "split" if dtype == "float32" else "ieee"
    answer = ask_planner(
        "bias", size, size, size, dtype, arithmetic, has_bias=False, gpu=gpu, any_family=True
    )
    return 2e-6 * float(size) ** 3 / float(answer["fallback_us"])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if KNOWN[name].capability != (9, 0)])
def test_a_gpu_reaches_what_is_published(name: str) -> None:
    """On Hopper the models are fitted instead."""
    published, numbers = PUBLISHED[name], KNOWN[name].numbers
    assert of_cublas(numbers) == pytest.approx(EFFICIENCY * published.tensor, rel=0.02), published.source
    if published.fp32:
        assert of_cublas(numbers, "float32") == pytest.approx(EFFICIENCY * published.fp32, rel=0.02), (
            published.source
        )


@pytest.mark.parametrize(
    ("capability", "shared_kb", "of_multiprocessor"),
    [(80, 163, 2048), (86, 99, 1024), (87, 163, 1024), (89, 99, 1024), (100, 227, 8192), (103, 227, 8192),
     (110, 99, 1024), (120, 99, 1024), (121, 99, 1024)],
)  # fmt: skip
def test_limits_go_by_capability(capability: int, shared_kb: int, of_multiprocessor: int) -> None:
    """Of one that is not known as much as of the smaller ones: every tile that is planned fits."""
    gpu = (capability, 10, 1000, 10**6)
    assert of_cublas(gpu) == pytest.approx(EFFICIENCY * 10 * 1000 * of_multiprocessor * 1e-6, rel=0.02)
    answer = ask_planner("bias_gelu", 8192, 8192, 8192, "bfloat16", "ieee", gpu=gpu)
    assert max(each["shared_bytes"] for each in answer["candidates"]) <= 1024 * shared_kb


def test_every_known_gpu_is_held_against_something() -> None:
    assert PUBLISHED.keys() == KNOWN.keys()


def test_geforce_adds_fp32_sums_at_half_the_rate() -> None:
    geforce = {"RTX 3080", "RTX 3090", "RTX 4080", "RTX 4090", "RTX 5080", "RTX 5090"}
    assert {name for name, gpu in KNOWN.items() if gpu.is_geforce} == geforce & KNOWN.keys()
    for one, other in (("RTX 3090", "A40"), ("RTX 4090", "RTX 6000 Ada"), ("RTX 5090", "RTX PRO 6000")):
        rates = [
            of_cublas(gpu.numbers) / gpu.multiprocessors / gpu.clock_mhz for gpu in (KNOWN[one], KNOWN[other])
        ]
        assert rates[0] == pytest.approx(rates[1] / 2, rel=0.01)
