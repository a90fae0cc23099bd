"""The words of `explain`: of kernels and arithmetics, and of what a derivative runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm import gradients, kernels, plans
from epigemm import precision as _precision
from epigemm.calls import ElementwiseCall, LinearCall
from epigemm.epilogues import BIAS, BIAS_RELU
from epigemm.recording import dtype_name


def owner(x: Tensor) -> str:
    """Whose elementwise kernel it is, to be followed by its name."""
    if not kernels.has_native(x):
        return "PyTorch reference,"
    return "epigemm CUDA kernel," if x.is_cuda else "epigemm CPU loop,"


def arithmetic_text(dtype: torch.dtype, arithmetic: str) -> str:
    """What numbers of a dtype are multiplied and accumulated in."""
    if dtype == torch.float64:
        return "float64"
    if dtype == torch.float32 and arithmetic == _precision.IEEE:
        return "ieee float32"
    return f"{arithmetic if dtype == torch.float32 else dtype_name(dtype)} products, float32 accumulation"


def tile_text(plan: dict[str, Any]) -> str:
    """The kernel that a plan names."""
    return (
        f"tile {plan['tile']}, cluster {plan['cluster']}, {plan['schedule']}, raster {plan['raster']}, "
        f"swizzle {plan['swizzle']}{_splits_text(plan)}"
    )


def _splits_text(plan: dict[str, Any]) -> str:
    splits = plan.get("splits", 1)
    return f", K in {splits} parts" if splits > 1 else ""


def candidate_text(candidate: dict[str, Any]) -> str:
    """One line of the kernels that were compared."""
    how = "measured" if "measured_us" in candidate else "predicted"
    return f"{plans.fused_us(candidate):9.1f} us {how:<9}  {tile_text(candidate)}"


def listed(title: str, items: Sequence[str]) -> list[str]:
    """Lines under one title."""
    heads = [f"{title}:"] + [""] * len(items)
    return [f"  {head:<11} {item}" for head, item in zip(heads, items, strict=False)]


# --- derivatives, as gradients.py makes them --------------------------------------------------------------------------

_PRODUCTS = (
    "then one matrix product each for the gradients of x and weight, where asked for, at the call's precision"
)
_KERNEL = "one derivative kernel (made of the epilogue's functor)"
_REFERENCE = "the registry's differentiable PyTorch reference"


def backward_linear(call: LinearCall) -> str:
    """What the first derivative of a linear function runs; operands whose gradient is asked for require one."""
    return f"{_backward_epilogue(call)}; {_PRODUCTS}"


def _backward_epilogue(call: LinearCall) -> str:
    x, epilogue, operands = call.x, call.epilogue, call.operands
    if epilogue is BIAS:
        return "nothing for the epilogue: the gradient of the result is that of the product"
    if epilogue is BIAS_RELU:
        return "torch's threshold_backward on the saved result, whose sign is the derivative of relu"
    if gradients.keeps_product(call):
        return f"{_derivative(x, operands)} on the saved product"
    if gradients.without_product(epilogue, operands):
        return f"{_derivative(x, operands)}; it reads no product, the epilogue being linear in it"
    gemm = "in 16 bits with an fp32 result" if x.element_size() == 2 else "at the call's precision"
    return f"the product again ({gemm}), as {_why_again(call.strict)}; {_REFERENCE} on it"


def _why_again(strict: bool) -> str:
    if strict:
        return "a strict call stays one kernel and saves none"
    return "one saved in 16 bits would be rounded ahead of the bias that is folded into the epilogue"


def backward_elementwise(call: ElementwiseCall) -> str:
    """What the first derivative of an elementwise function runs."""
    return f"{_derivative(call.x, call.operands)} on the saved x"


def _derivative(x: Tensor, operands: Sequence[Tensor]) -> str:
    if any(operand.requires_grad for operand in operands):
        return f"{_REFERENCE} (a gradient of an operand is asked for)"
    return _KERNEL if kernels.has_native(x) else _REFERENCE
