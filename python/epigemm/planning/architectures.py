"""What the planner knows of a GPU."""

from __future__ import annotations

import json
from typing import Any

from epigemm._native import ops


def of(gpu: tuple[int, ...] = (), device: int = -1) -> dict[str, Any]:
    """A GPU's limits, and what it reaches; `gpu` and `device` as of `plans.ask`.

    Rates are of the whole GPU, in flops a microsecond: "tensor_flops_per_us" in 16 bits with fp32 sums by the
    instructions of the architecture's own kernels, "cublas_flops_per_us" by cuBLAS's, "fp32_flops_per_us" without
    tensor cores. "shared_bytes" is what a thread block has at most.

    Raises:
        RuntimeError: the numbers describe no GPU, or there is no such device.
    """
    answer: dict[str, Any] = json.loads(ops._architecture(gpu or None, device))
    return answer
