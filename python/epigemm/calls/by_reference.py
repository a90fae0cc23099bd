"""Calls by PyTorch's operators: the reference of an epilogue that is made at run time, behind torch's GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import precision

_torch_linear = torch.nn.functional.linear


def linear(
    epilogue: Any,
    x: Tensor,
    weight: Tensor,
    # one for each of the epilogue's, of as many dimensions as the result where they have its rows
    operands: Sequence[Any],
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: int,  # whether torch's own setting is less accurate than the call
) -> Tensor:
    """D = epilogue(x @ weight.T) by PyTorch's operators, of arguments that are known to fit."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    bias, place = None, epilogue.bias_place
    if place is not None:  # rounded with the product, as PyTorch's operators do
        bias = operands[place - 1]
        operands = [*operands[: place - 1], bias.new_full((), -0.0), *operands[place:]]
    with precision.full_fp32(x.device.type) if full_fp32 else nullcontext():
        product = _torch_linear(rows, weight, bias)
    if rows is not x:
        product = product.reshape(*x.shape[:-1], weight.shape[0])
    result: Tensor = epilogue.evaluate(product, operands)
    return result if out is None else out.copy_(result)


def elementwise_by_reference(epilogue: Any, x: Tensor, operands: Sequence[Any], out: Tensor | None) -> Tensor:
    """D = epilogue(x), as `linear`."""
    result: Tensor = epilogue.evaluate(x, operands)
    if out is None and x.is_contiguous():
        return result
    return (torch.empty_like(x) if out is None else out).copy_(result)
