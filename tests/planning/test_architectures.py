"""What the planner knows of a GPU, held against what NVIDIA publishes of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from epigemm.planning import architectures, plans
from epigemm.planning.gpus import KNOWN

A100, GA102 = "A100 Tensor Core GPU Architecture", "Ampere GA102 GPU Architecture"
ADA, BLACKWELL = "Ada GPU Architecture", "RTX Blackwell GPU Architecture"


class Published(NamedTuple):
    """Dense figures in TFLOPS, and where they are from."""

    tensor: float  # fp16 tensor cores with fp32 sums
    fp32: float  # without tensor cores; 0: not held against
    shared_kb: (
        int  # of a thread block: CUDA C++ programming guide, technical specifications per compute capability
    )
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
MMA_IS_SLOWER = {"B200"}  # which reaches its rate by other instructions than mma.sync


def test_every_known_gpu_is_held_against_something() -> None:
    assert PUBLISHED.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gpu_reaches_what_is_published(name: str) -> None:
    published, found = PUBLISHED[name], architectures.of(KNOWN[name].numbers)
    assert found["cublas_flops_per_us"] == pytest.approx(1e6 * published.tensor, rel=0.02), published.source
    assert (found["tensor_flops_per_us"] < found["cublas_flops_per_us"]) == (name in MMA_IS_SLOWER)
    if published.fp32:
        assert found["fp32_flops_per_us"] == pytest.approx(1e6 * published.fp32, rel=0.02), published.source
    assert found["shared_bytes"] == 1024 * published.shared_kb
    assert found["l2_bytes"] == 1e6 * KNOWN[name].l2_mb


@pytest.mark.parametrize("name", KNOWN)
def test_models_are_fitted_on_hopper_alone(name: str) -> None:
    found = architectures.of(KNOWN[name].numbers)
    assert found["is_fitted"] == (KNOWN[name].capability == (9, 0)) == (found["name"] == "sm90")
    assert found["least_gain"] == (0 if found["is_fitted"] else 1.1)
    assert found["cublas_efficiency"] == (0 if found["is_fitted"] else 0.9)
    assert not found["is_calibrated"] and not found["is_speed_assumed"]


@pytest.mark.parametrize(
    ("capability", "shared_kb", "of_multiprocessor"),
    [(80, 163, 2048), (86, 99, 1024), (87, 163, 1024), (89, 99, 1024), (100, 227, 2048), (103, 227, 2048),
     (110, 99, 1024), (120, 99, 1024), (121, 99, 1024)],
)  # fmt: skip
def test_limits_go_by_capability(capability: int, shared_kb: int, of_multiprocessor: int) -> None:
    """Of one that is not known as much as of the smaller ones: every tile that is planned fits."""
    found = architectures.of((capability, 10, 1000, 10**6))
    assert found["shared_bytes"] == 1024 * shared_kb
    assert found["tensor_flops_per_us"] == 10 * 1000 * of_multiprocessor
    assert found["l2_bytes"] > 0, "assumed, where the device does not tell"


def test_geforce_adds_fp32_sums_at_half_the_rate() -> None:
    pairs = (("RTX 3090", "A40"), ("RTX 4090", "RTX 6000 Ada"), ("RTX 5090", "RTX PRO 6000"))
    for geforce, other in pairs:
        rates = []
        for name in (geforce, other):
            found = architectures.of(KNOWN[name].numbers)
            rates.append(found["tensor_flops_per_us"] / found["multiprocessors"] / found["clock_mhz"])
            assert found["has_half_rate_sums"] == (name == geforce)
        assert rates == [512, 1024]


CALIBRATED = (250_000_000, 800)  # flops a microsecond, thousandths


def test_figures_that_were_measured_count() -> None:
    numbers = KNOWN["A100 40 GB"].numbers
    before, after = architectures.of(numbers), architectures.of((*numbers, *CALIBRATED))
    assert after["is_calibrated"] and after["tensor_flops_per_us"] == after["cublas_flops_per_us"] == 250e6
    assert after["cublas_efficiency"] == 0.8 and after["least_gain"] == 1.05 < before["least_gain"]
    assert after["fp32_flops_per_us"] == before["fp32_flops_per_us"]
    asked = [
        plans.ask("bias_gelu", 8192, 8192, 8192, "bfloat16", "ieee", gpu=gpu, any_family=True)
        for gpu in (numbers, (*numbers, *CALIBRATED))
    ]
    slower = 311.87 / 250
    fused = [each["candidates"][0]["predicted_us"] for each in asked]
    assert fused[1] / fused[0] == pytest.approx(slower, rel=0.02)
    assert asked[1]["fallback_us"] / asked[0]["fallback_us"] == pytest.approx(slower * 0.9 / 0.8, rel=0.02)


def test_calibrated_plans_win_by_a_twentieth() -> None:
    """With measured figures of the GPU what the kernels reach is still assumed."""
    gains = []
    for n in range(1024, 16384, 512):
        numbers = (*KNOWN["A100 40 GB"].numbers, *CALIBRATED)
        found = plans.ask("bias_gelu", 2048, n, 4096, "bfloat16", "ieee", gpu=numbers, any_family=True)
        gain = found["fallback_us"] / found["candidates"][0]["predicted_us"]
        assert found["fused"] == (gain >= 1.05)
        gains.append(gain)
    assert any(1.05 <= gain < 1.10 for gain in gains) and any(gain < 1.05 for gain in gains)


def test_hoppers_models_take_no_figures() -> None:
    numbers = KNOWN["H200"].numbers
    asked = [
        plans.ask("bias_gelu", 2048, 4096, 4096, "bfloat16", "ieee", gpu=gpu)
        for gpu in (numbers, (*numbers, *CALIBRATED))
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    "gpu", [(80,), (80, 108, 1410), (80, 108, 1, 1, 1, 1, 1), (80, 108, 1, 1, 1, 1, 0, 5)]
)
def test_numbers_that_describe_no_gpu(gpu: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"gpu must be empty or|figures of a calibration must be positive"):
        architectures.of(gpu)
    with pytest.raises(RuntimeError, match="device: got -1, which is no CUDA device"):
        architectures.of()
