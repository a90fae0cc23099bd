"""Layouts of tensors: which ones the kernels can read, and leading axes that are one axis of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_unsafe_view: Any = torch.ops.aten._unsafe_view.default


def flattens(tensor: Tensor) -> bool:
    """Whether a single stride reaches all leading dimensions."""
    if tensor.dim() <= 2:
        return True
    try:
        tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return False
    return True


def unflattened(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """A new result in its final shape. Not a view: autograd refuses to write a view that was made under `no_grad`."""
    result: Tensor = flat if flat.shape == shape else _unsafe_view(flat, shape)
    return result


def readable(tensor: Tensor) -> Tensor:
    """A tensor as the kernels read it: matrices by rows, vectors without gaps."""
    if tensor.dim() == 0:
        return tensor
    if tensor.dim() > 1:
        is_by_rows = tensor.stride(-1) == 1 if tensor.shape[-1] > 1 else tensor.is_contiguous()
        return tensor if is_by_rows and flattens(tensor) else tensor.contiguous()
    if tensor.stride(0) == 1:
        return tensor
    # For torch a single element is contiguous whatever its stride is.
    return tensor.contiguous().as_strided(tensor.shape, (1,))
