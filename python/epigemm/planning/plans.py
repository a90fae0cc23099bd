"""What the planner says about a problem that is given in numbers."""

from __future__ import annotations

import functools
import json
from typing import Any

from torch import Tensor

from epigemm._native import build_info, cuda_status, ops
from epigemm.planning import measured

_ALIGNED = 256  # bytes: what torch's allocator gives at least


def has_gpu_kernels(tensor: Tensor) -> bool:
    """Whether epigemm's CUDA kernels run where `tensor` is."""
    return tensor.is_cuda and usable(tensor.get_device())


@functools.cache
def usable(device: int) -> bool:
    """Whether the kernels run on a CUDA device; the first question brings in what was measured on it."""
    if cuda_status(device):
        return False
    measured.load(device)
    ops._set_ready(device)
    return True


@functools.cache
def no_gemm_kernels() -> str:
    """Why this build cannot run any GEMM kernel; empty when it can."""
    return "" if build_info()["gemm_kernels"] else "epigemm was built without the Hopper GEMM kernels"


def gpu_numbers(device: int) -> tuple[int, ...]:
    """A device for `ask`: empty, for the planner reads it from CUDA. Tests describe another GPU in its place."""
    return ()


def ask(
    epilogue: str,
    m: int,
    n: int,
    k: int,
    dtype: str,  # of x, weight and out, as "float32"
    arithmetic: str,  # what fp32 operands are multiplied in: "ieee", "tf32", "split" or "scaled"
    *,
    packed: bool = False,  # on fp16 slices: whether the weight's are there already
    tf32_allowed: bool = False,  # whether torch's GEMM, which would take over, may use TF32
    has_bias: bool = True,  # whether there is one, where the epilogue takes it
    invariant: bool = False,  # whether the plan must not depend on M
    # row strides of x, weight and out, in elements; None: contiguous matrices
    strides: tuple[int, int, int] | None = None,
    alignment: int = _ALIGNED,  # bytes by which the addresses of all three divide
    any_family: bool = False,  # also kernels that wait for their first run on such a GPU
    # compute capability (90 for 9.0), multiprocessors and then perhaps clock in MHz and memory bandwidth in bytes a
    # microsecond, then perhaps bytes of L2 and 1 where fp32 sums take the tensor cores twice as long (GeForce);
    # empty: those of `device`
    gpu: tuple[int, ...] = (),
    device: int = -1,  # the CUDA device, whose measured choices count; -1: nobody's
) -> dict[str, Any]:
    """All that the planner says, candidates included."""
    flags = (packed, tf32_allowed, has_bias, invariant, any_family)
    problem = (epilogue, m, n, k, strides, alignment, dtype, arithmetic)
    answer: dict[str, Any] = json.loads(ops._plan(*problem, *flags, gpu or None, device))
    return answer


def fused_us(answer: dict[str, Any]) -> float:
    """What dispatch says a fused call takes: as measured, else as predicted; infinite where it does not run."""
    return float(answer.get("measured_us", answer.get("predicted_us", "inf")))


def fallback_us(answer: dict[str, Any]) -> float:
    """The same of the fallback."""
    return float(answer.get("fallback_measured_us", answer["fallback_us"]))


def tile_text(plan: dict[str, Any]) -> str:
    """The kernel that a plan names, for people."""
    splits = plan.get("splits", 1)
    return (
        f"tile {plan['tile']}, cluster {plan['cluster']}, {plan['schedule']}, raster {plan['raster']}, "
        f"swizzle {plan['swizzle']}{f', K in {splits} parts' if splits > 1 else ''}"
    )
