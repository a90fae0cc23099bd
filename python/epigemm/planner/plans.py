"""Asks the planner about a problem that is given in numbers."""

from __future__ import annotations

import functools
import json
from typing import Any

from torch import Tensor

from epigemm._native import build_info, cuda_status, ops
from epigemm.planner import times

_ALIGNED = 256  # bytes: the least alignment of torch's allocator


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
    """A device for `ask`: empty, because the planner reads it from CUDA. Tests describe another GPU here."""
    return ()


def ask(
    epilogue: str,
    m: int,
    n: int,
    k: int,
    dtype: str,  # of x, weight and out, as "float32"
    arithmetic: str,  # what fp32 operands are multiplied in: "ieee", "tf32", "split" or "scaled"
    *,
    packed: bool = False,  # on fp16 slices: whether the weight has a pack
    tf32_allowed: bool = False,  # whether torch's GEMM, as the fallback, may use TF32
    has_bias: bool = True,  # whether the call has a bias, if the epilogue takes one
    invariant: bool = False,  # whether the plan must not depend on M
    # row strides of x, weight and out, in elements; None: contiguous matrices
    strides: tuple[int, int, int] | None = None,
    alignment: int = _ALIGNED,  # bytes; the addresses of all three are multiples of it
    any_family: bool = False,  # whether to include mma.sync kernels where TMA's run, on Hopper
    # compute capability (90 for 9.0), multiprocessors and then perhaps clock in MHz and memory bandwidth in bytes a
    # microsecond, then perhaps bytes of L2 and 1 where fp32 sums take the tensor cores twice as long (GeForce); empty:
    # those of `device`
    gpu: tuple[int, ...] = (),
    device: int = -1,  # the CUDA device whose measurements are used; -1: none
) -> dict[str, Any]:
    """The planner's answer, with all candidates."""
    flags = (packed, tf32_allowed, has_bias, invariant, any_family)
    problem = (epilogue, m, n, k, strides, alignment, dtype, arithmetic)
    answer: dict[str, Any] = json.loads(ops._plan(*problem, *flags, gpu or None, device))
    return answer


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
