"""BatchNorm by the batch's own statistics, and its derivative: csrc/elementwise/batch_norm.h has the formulas.

The kernels run on GPUs. Elsewhere PyTorch's operators compute the same formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.calls import entry
from epigemm.calls.elementwise_kernels import has_native
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

    @classmethod
    def of(cls, vectors: Sequence[Tensor | None], eps: float, relu: bool) -> Norm:
        """Of scale, weight and bias."""
        scale, weight, bias = vectors
        return cls(scale, weight, bias, eps, relu)


def normalise(u: Tensor, moments: Moments, norm: Norm, running: Running) -> Tensor:
    """y, of u's dtype; the running statistics follow, and a batch is counted. `moments`: those of u.

    Moments of blocks are merged by the same kernel.

    The version counters of the running statistics do not change, as with PyTorch's BatchNorm: a backward pass of an
    earlier call may have saved them. That of the number of batches does.
    """
    tracked, counted, momentum = running.tracked, None, running.momentum
    has_kernels = has_native(u)
    if tracked is not None and has_kernels and momentum is not None:
        entry.mark_written(tracked)
        tracked, counted = None, tracked
    elif tracked is not None:
        tracked.add_(1)
    mean, var, blocks, block_rows = moments
    if not has_kernels:
        return _normalise_by_torch(u, mean, var, norm, running)
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
    if not has_native(u):
        return _gradients_by_torch(grad, u, mean, var, norm, dtypes)
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
    wide = u.to(compute_dtype(u.dtype))
    centred = wide - wide.mean(0)
    return _finish(centred, (centred * centred).mean(0), norm, u.dtype)


def _slope(var: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """1 / sqrt(scale^2 * var + eps), that times the scale, and times the weight."""
    scale, weight, _ = _wide(norm, var.dtype)
    inverse = torch.rsqrt((var if scale is None else scale * scale * var) + norm.eps)
    t = inverse if scale is None else scale * inverse
    return inverse, t, t if weight is None else t * weight


def _wide(norm: Norm, dtype: torch.dtype) -> list[Tensor | None]:
    return [None if vector is None else vector.to(dtype) for vector in norm[:3]]


def _finish(centred: Tensor, var: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    *_, slope = _slope(var, norm)
    y = centred * slope if norm.bias is None else torch.addcmul(norm.bias.to(var.dtype), centred, slope)
    y = y.to(dtype)
    return torch.relu(y) if norm.relu else y


def _normalise_by_torch(u: Tensor, mean: Tensor, var: Tensor, norm: Norm, running: Running) -> Tensor:
    if running.mean is not None and running.var is not None:
        if running.momentum is not None:
            factor: float | Tensor = running.momentum
        else:
            assert running.tracked is not None
            factor = 1.0 / running.tracked.to(mean.dtype)
        rows, scale = u.shape[0], _wide(norm, mean.dtype)[0]
        shifted = (mean, var) if scale is None else (mean * scale, var * scale * scale)
        for kept, value in ((running.mean, shifted[0]), (running.var, shifted[1] * (rows / (rows - 1)))):
            kept.data.copy_(kept.to(value.dtype) * (1 - factor) + value * factor)
    return _finish(u.to(mean.dtype) - mean, var, norm, u.dtype)


def _gradients_by_torch(
    grad: Tensor,
    u: Tensor,
    mean: Tensor,
    var: Tensor,
    norm: Norm,
    dtypes: Sequence[torch.dtype | None],
) -> Gradients:
    rows, centred, wide = u.shape[0], u.to(mean.dtype) - mean, grad.to(mean.dtype)
    if norm.relu:
        wide = torch.where(_finish(centred, var, norm._replace(relu=False), u.dtype) <= 0, 0.0, wide)
    inverse, t, slope = _slope(var, norm)
    total, by_centred = wide.sum(0), (wide * centred).sum(0)
    _, weight, _ = _wide(norm, mean.dtype)
    of_scale = by_centred * (norm.eps * inverse * inverse * inverse)
    found = (
        slope * (wide - total / rows - centred * (t * t * by_centred / rows)),
        total - total,
        of_scale if weight is None else of_scale * weight,
        t * by_centred,
        total,
    )
    return Gradients(
        *(None if dtype is None else value.to(dtype) for value, dtype in zip(found, dtypes, strict=True))
    )
