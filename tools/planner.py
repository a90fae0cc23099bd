"""Asks the planner about a problem that is given in numbers."""

from __future__ import annotations

import json
from typing import Any

from epigemm._native import ops

ALIGNED = 256  # bytes: the least alignment of torch's allocator


def ask_planner(
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
    alignment: int = ALIGNED,  # bytes; the addresses of all three are multiples of it
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
