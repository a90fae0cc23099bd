"""The product of a layer that BatchNorm follows, and the mean and the biased variance of each of its columns.

On CUDA most kernels on Hopper reduce blocks of rows while they store them. Behind other kernels another one reads the
result. A further kernel merges the blocks (csrc/reduce). Few blocks are left to BatchNorm's kernel, which merges them
before it normalises. Elsewhere `torch.var_mean` follows the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.calls.resolve import Beside
from epigemm.epilogues.registry import compute_dtype
from epigemm.planner import plans

BLOCK_ROWS = 64
"""Of a block that a kernel behind the product reduces: kMomentRows of csrc/reduce."""
MOST_LEFT = 16
"""The most blocks that are left to BatchNorm's kernel: kMostMergedBehind of csrc/reduce."""
_ROWS = 2
"""Of the memory for moments: mean, biased variance. kMomentsOfColumn of csrc/reduce."""

_column_moments_out = operator("_column_moments_out")


class Moments(NamedTuple):
    """The mean and the biased variance of each column, `[N]` each in fp32 (fp64 of fp64).

    If `blocks` is given, neither is computed yet, but the moments of blocks of `block_rows` rows are: `[blocks, N, 2]`,
    mean and sum of squared deviations.
    """

    mean: Tensor
    var: Tensor
    blocks: Tensor | None = None
    block_rows: int = 0


def with_moments(call: LinearCall, *, leaves_blocks: bool = False) -> tuple[Tensor, Moments]:
    """The result z `[M, N]` of a call, and the mean and the biased variance of each of its columns.

    For callers below autograd that have made autocast's casts. The statistics are those of z as it is stored, and the
    same bits at every call of these tensors. `leaves_blocks`: leave the merge of few blocks to the caller.

    Raises:
        RuntimeError: arguments that do not fit; `strict`, and no fused kernel would run.
    """
    if is_served(call.x):
        like: Any = {"dtype": compute_dtype(call.x.dtype), "device": call.x.device}
        columns = call.weight.shape[0]
        moments = torch.empty((_ROWS, columns), **like)
        # No kernel's blocks have more rows than twice `BLOCK_ROWS`.
        may_leave = leaves_blocks and call.rows <= MOST_LEFT * 2 * BLOCK_ROWS
        blocks = torch.empty((MOST_LEFT, columns, 2), **like) if may_leave else None
        found = resolve.one_kernel(call._replace(statistics=True), Beside(None, moments, blocks))
        if not isinstance(found, int):
            (z, block_rows), (mean, var) = found, moments.unbind(0)
            return z, Moments(mean, var, blocks if block_rows else None, block_rows)
    z = resolve.run(call)
    return z, column_moments(z, leaves_blocks=leaves_blocks)


def is_served(x: Tensor) -> bool:
    """Whether the entry makes calls of this x that also give moments: on a GPU, not in fp64."""
    return x.dtype is not torch.float64 and plans.has_gpu_kernels(x)


def column_moments(z: Tensor, *, leaves_blocks: bool = False) -> Moments:
    """The mean and the biased variance of each column of a matrix `[M, N]`.

    For callers below autograd. Two calls give the same bits. `leaves_blocks`: leave the merge of few blocks to the
    caller.
    """
    wide = compute_dtype(z.dtype)
    rows, columns = z.shape
    if z.numel() == 0 or not plans.has_gpu_kernels(z):
        variance, mean = torch.var_mean(z.to(wide), 0, correction=0)
        return Moments(mean, variance)
    z = z if z.stride(1) == 1 or columns == 1 else z.contiguous()
    count = -(-rows // BLOCK_ROWS)
    blocks = torch.empty((count, columns, 2), dtype=wide, device=z.device)
    moments = torch.empty((_ROWS, columns), dtype=wide, device=z.device)
    is_left = leaves_blocks and count <= MOST_LEFT
    _column_moments_out(z, blocks, None if is_left else moments)
    mean, var = moments.unbind(0)
    return Moments(mean, var, blocks, BLOCK_ROWS) if is_left else Moments(mean, var)
