"""Words of explanations: whose kernel it is, what it computes in, and lines of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import elementwise_kernels
from epigemm.planner import plans

OF_BLOCKS = "epigemm CUDA kernel, mean and variance of blocks of rows"
OF_COLUMNS = "epigemm CUDA kernel, mean and variance of the columns, from those of the blocks"
WITHIN = "the product's kernel reduces the blocks of rows that it stores"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def kernel_owner(x: Tensor) -> str:
    """The owner of an elementwise kernel, for a text in which the kernel's name follows."""
    return "epigemm CUDA kernel," if elementwise_kernels.has_native(x) else "PyTorch reference,"


def arithmetic_text(dtype: torch.dtype, arithmetic: str) -> str:
    """The arithmetic of products and sums for a dtype."""
    if dtype == torch.float64:
        return "float64"
    if dtype == torch.float32 and arithmetic == _precision.IEEE:
        return "ieee float32"
    return f"{arithmetic if dtype == torch.float32 else dtype_name(dtype)} products, float32 accumulation"


def in_its_own_kernel(call: LinearCall | ElementwiseCall) -> str:
    """The launch of a call's epilogue behind a product."""
    return f"{kernel_owner(call.x)} {call.epilogue.name}"


def candidate_text(candidate: dict[str, Any]) -> str:
    """One line of the kernels that were compared."""
    how = "measured" if "measured_us" in candidate else "predicted"
    return f"{plans.fused_us(candidate):9.1f} us {how:<9}  {plans.tile_text(candidate)}"


def listed(title: str, items: Sequence[str]) -> list[str]:
    """Lines under one title."""
    heads = [f"{title}:"] + [""] * len(items)
    return [f"  {head:<11} {item}" for head, item in zip(heads, items, strict=False)]
