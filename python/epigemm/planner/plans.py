"""What the planner's answers say, and where epigemm's kernels run."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from epigemm._native import build_info, cuda_status, ops
from epigemm.planner import times


def has_gpu_kernels(tensor: Tensor) -> bool:
    """Whether epigemm's CUDA kernels run where `tensor` is."""
    return tensor.is_cuda and usable(tensor.get_device())


@functools.cache
def usable(device: int) -> bool:
    """Whether the kernels run on a CUDA device. The first call for a device loads what was measured on it."""
    if cuda_status(device):
        return False
    times.load(device)
    ops._set_ready(device)
    return True


@functools.cache
def no_gemm_kernels() -> str:
    """Why this build cannot run any GEMM kernel; empty when it can."""
    return "" if build_info()["gemm_kernels"] else "epigemm was built without the Hopper GEMM kernels"


def gpu_numbers(device: int) -> tuple[int, ...]:
    """A device in figures: empty, because the planner reads it from CUDA. Tests describe another GPU here."""
    return ()


def fused_us(answer: dict[str, Any]) -> float:
    """The microseconds of the fused call: measured, else predicted; infinite if it does not run."""
    return float(answer.get("measured_us", answer.get("predicted_us", "inf")))


def fallback_us(answer: dict[str, Any]) -> float:
    """The same of the fallback."""
    return float(answer.get("fallback_measured_us", answer["fallback_us"]))


def tile_text(plan: dict[str, Any]) -> str:
    """The kernel of a plan, in words."""
    splits = plan.get("splits", 1)
    return (
        f"tile {plan['tile']}, cluster {plan['cluster']}, {plan['schedule']}, raster {plan['raster']}, "
        f"swizzle {plan['swizzle']}{f', K in {splits} parts' if splits > 1 else ''}"
    )
