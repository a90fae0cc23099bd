"""BatchNorm by the batch's own statistics, and its derivative: csrc/elementwise/batch_norm.h has the formulas.

The kernels run on GPUs; who calls them asks (`epigemm.batch_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.calls import entry
from epigemm.calls.moments import Moments
from epigemm.epilogues.registry import compute_dtype

_batch_norm_out = operator("_batch_norm_out")
_batch_norm_backward_out = operator("_batch_norm_backward_out")

_BYTES_OF_BAND = 512  # of the columns that a CTA of the kernels has: 16 bytes of each of 32 lanes
_WANTED_CTAS = 1024
_LEAST_ROWS = 32  # of a CTA's sums


class Running(NamedTuple):
    """What training mode updates."""

    mean: Tensor | None  # [N]
    var: Tensor | None  # [N]
    tracked: Tensor | None  # the number of batches, int64
    momentum: float | None  # the new value's weight; None: 1 / tracked, the cumulative average


NOTHING_RUNS = Running(None, None, None, 0.0)


class Norm(NamedTuple):
    """y = (u - mean) / sqrt(variance + eps / scale^2) * weight + bias, and perhaps its ReLU; vectors are `[N]`."""

    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    relu: bool


def normalise(u: Tensor, moments: Moments, norm: Norm, running: Running) -> Tensor:
    """y, of u's dtype; the running statistics follow, and a batch is counted. `moments`: those of u.

    Moments of blocks are merged by the same kernel.

    The version counters of the running statistics do not change, as with PyTorch's BatchNorm: a backward pass of an
    earlier call may have saved them. That of the number of batches does.
    """
    tracked, counted, momentum = running.tracked, None, running.momentum
    if tracked is not None and momentum is not None:
        entry.mark_written(tracked)
        tracked, counted = None, tracked
    elif tracked is not None:
        tracked.add_(1)
    mean, var, blocks, block_rows = moments
    u = u.contiguous()
    out = torch.empty_like(u)
    last = (blocks, block_rows, counted)
    _batch_norm_out(u, mean, var, *norm, running.mean, running.var, tracked, momentum or 0.0, out, *last)
    return out


class Gradients(NamedTuple):
    """With respect to u, and to the vectors; `shift`: a vector that was added to u."""

    u: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def gradients(
    grad: Tensor,
    u: Tensor,
    mean: Tensor,
    var: Tensor,
    norm: Norm,
    dtypes: Sequence[torch.dtype | None],
) -> Gradients:
    """The gradients, each of the dtype that `dtypes` has for it, in their order; None: that one is not needed.

    That of a shift is 0, because y does not depend on it; NaN where the gradients' sum is not finite.
    """
    grad, u = grad.contiguous(), u.contiguous()
    rows, columns = u.shape
    shapes = (u.shape, *[(columns,)] * 4)
    of_u, of_shift, *of_norm = (
        None if dtype is None else torch.empty(shape, dtype=dtype, device=u.device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    workspace = torch.empty(
        (2 * chunks_of(rows, columns, u.element_size()) + 3, columns), dtype=mean.dtype, device=u.device
    )
    _batch_norm_backward_out(grad, u, mean, var, *norm, of_u, *of_norm, of_shift, workspace)
    return Gradients(of_u, of_shift, *of_norm)


def chunks_of(rows: int, columns: int, element_size: int) -> int:
    """Into how many parts the rows are divided, whose sums are added later."""
    bands = -(-columns * element_size // _BYTES_OF_BAND)
    return max(1, min(-(-_WANTED_CTAS // bands), rows // _LEAST_ROWS))


def reference(u: Tensor, norm: Norm) -> Tensor:
    """y in differentiable PyTorch, with u's own moments."""
    dtype = compute_dtype(u.dtype)
    scale, weight, bias = (None if vector is None else vector.to(dtype) for vector in norm[:3])
    wide = u.to(dtype)
    centred = wide - wide.mean(0)
    var = (centred * centred).mean(0)
    inverse = torch.rsqrt((var if scale is None else scale * scale * var) + norm.eps)
    slope = inverse if scale is None else scale * inverse
    slope = slope if weight is None else slope * weight
    y = centred * slope if bias is None else torch.addcmul(bias, centred, slope)
    return torch.relu(y.to(u.dtype)) if norm.relu else y.to(u.dtype)
