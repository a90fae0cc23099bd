"""Linear calls that also return statistics of their result: mean, biased variance and sum over its rows or columns.

On CUDA most kernels on Hopper reduce blocks of rows and of columns while they store them. Behind other kernels
another one reads the result, for the statistics of columns alone. A further kernel merges the blocks (csrc/reduce). Few
blocks are left to BatchNorm's kernel, which merges them before it normalises. Elsewhere `torch.var_mean` follows the
call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.arguments import checks
from epigemm.arguments.calls import FoldCall, LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import beside, deeds, entry
from epigemm.calls.routed import attempt
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.parts import Wanted
from epigemm.epilogues.registry import compute_dtype
from epigemm.packs import keep_mode
from epigemm.planning import dry_runs, plans

BLOCK_ROWS = 64
"""Of a block that a kernel behind the product reduces: kMomentRows of csrc/reduce."""
MOST_LEFT = 16
"""The most blocks that are left to BatchNorm's kernel: kMostMergedBehind of csrc/reduce."""
_ROWS = 3
"""Of the memory for moments: mean, biased variance, sum. kMomentsOfColumn of csrc/reduce."""

_any_autocast = torch._C._is_any_autocast_enabled
_column_moments_out = operator("_column_moments_out")


class Moments(NamedTuple):
    """The mean, the biased variance and the sum of each column or row, `[N]` or `[M]` each in fp32 (fp64 of fp64).

    The sum is None where no kernel of epigemm has computed it. If `blocks` is given, none of these is
    computed yet, but the moments of blocks of `block_rows` rows are: `[blocks, N, 2]`, mean and sum of
    squared deviations.
    """

    mean: Tensor
    var: Tensor
    blocks: Tensor | None = None
    block_rows: int = 0
    sum: Tensor | None = None


class _Memory(NamedTuple):
    """For the moments of columns, of blocks of them, and of rows, as the entry takes it (csrc/call/linear.h)."""

    columns: Tensor | None
    needs_columns: bool
    blocks: Tensor | None
    rows: Tensor | None = None

    @property
    def number(self) -> int:
        """As of `number_of`."""
        return number_of(Wanted(self.columns is not None, self.rows is not None, self.needs_columns))


def linear_folded_with_moments(
    x: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    precision: str | None,
    strict: bool,
    pack_use: str | None,
    *,
    leaves_blocks: bool = False,
) -> tuple[Tensor, Moments]:
    """z = (x @ weight.T + bias) * scale, and the mean and the biased variance of each of its columns.

    For callers below autograd that have made autocast's casts. The statistics are those of z as it is stored, and the
    same bits at every call of these tensors.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`.
        vectors: bias and scale, `[N]` each, or None.
        precision: of the product in fp32, as of the public functions.
        strict: refuse PyTorch's GEMM.
        pack_use: what the call may do with the weight's pack; None: `epigemm.keep_packs` decides.
        leaves_blocks: leave the merge of few blocks to the caller.

    Returns:
        z `[M, N]` in x's dtype, and the moments of its columns.

    Raises:
        RuntimeError: arguments that do not fit; `strict`, and no fused kernel would run.
    """
    bias, scale = vectors
    fold: tuple[Any, ...] | None = None if scale is None else (bias, scale, None, None, None, None, 0.0)
    call = LinearCall(
        BIAS if fold is None else SCALE_BATCH_NORM,
        x,
        weight,
        (bias,) if fold is None else (),
        precision=DEFAULT if precision is None else checks.precision(precision),
        pack_use=keep_mode.pack_use(weight) if pack_use is None else pack_use,
        strict=strict,
    )
    if is_served(x):
        moments, blocks = _memory(x, weight.shape[0], leaves_blocks)
        found = _run(call, fold, _Memory(moments, True, blocks), dry_runs.ROUTED)
        if not isinstance(found, int):
            z, _, block_rows = found
            mean, var, total = moments.unbind(0)
            return z, Moments(mean, var, blocks if block_rows else None, block_rows, total)
    z = _without_moments(call, fold, None if precision is None else call.precision)
    return z, column_moments(z, leaves_blocks=leaves_blocks)


def linear(call: LinearCall, wanted: Wanted) -> tuple[Tensor, dict[int, Moments]] | None:
    """epilogue(x @ weight.T), and its moments by the axis that they reduce.

    Those of columns that are needed are given by any kernels; others only where the product's kernel reduces what it
    stores. For callers above autograd. None if these have to make the call without moments: something has to intercept
    it, or some tensor cannot be read as it lies, or no kernel can be linked.

    Args:
        call: the call.
        wanted: the moments.
    """
    if not is_served(call.x):
        return None
    like: Any = {"dtype": compute_dtype(call.x.dtype), "device": call.x.device}
    columns = torch.empty((_ROWS, call.weight.shape[0]), **like) if wanted.columns else None
    rows = torch.empty((_ROWS, call.rows), **like) if wanted.rows else None
    memory = _Memory(columns, wanted.needs_columns, None, rows)
    found = attempt(call, call.inputs[1:], lambda circumstances: _run(call, None, memory, circumstances))
    if found is None:
        return None
    z, is_within, _ = found
    given_of = {0: columns if is_within or wanted.needs_columns else None, 1: rows if is_within else None}
    return z, {
        axis: Moments(each[0], each[1], sum=each[2]) for axis, each in given_of.items() if each is not None
    }


def number_of(wanted: Wanted) -> int:
    """The same moments for `dry_runs.dry_run`."""
    of_columns = (
        dry_runs.COLUMNS if wanted.needs_columns else dry_runs.COLUMNS_WITHIN if wanted.columns else 0
    )
    return of_columns | (dry_runs.ROWS_WITHIN if wanted.rows else 0)


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
    mean, var, total = moments.unbind(0)
    return Moments(mean, var, blocks, BLOCK_ROWS) if is_left else Moments(mean, var, sum=total)


def _memory(x: Tensor, columns: int, leaves_blocks: bool) -> tuple[Tensor, Tensor | None]:
    """For the moments of the columns, and for those of blocks if these may be few enough to be left."""
    like: Any = {"dtype": compute_dtype(x.dtype), "device": x.device}
    moments = torch.empty((_ROWS, columns), **like)
    rows = x.numel() // max(x.shape[-1], 1)
    if not leaves_blocks or rows > MOST_LEFT * 2 * BLOCK_ROWS:  # no kernel's blocks have more rows
        return moments, None
    return moments, torch.empty((MOST_LEFT, columns, 2), **like)


def _run(
    call: LinearCall,
    fold: tuple[Any, ...] | None,
    memory: _Memory,
    circumstances: int,
) -> tuple[Tensor, bool, int] | int:
    """A call, or the reason why there is no result, after what can be done about it."""
    out = None
    if circumstances & dry_runs.ROUTED and _any_autocast():
        out = call.new_out()  # torch's GEMM with out= keeps the dtype
        circumstances |= dry_runs.OUT_APART
    tensors = (call.epilogue.number, call.x, call.weight, tuple(call.operands), fold, out)
    order = dry_runs.order_on(call, call.x.device.type)
    if fold is not None:  # empty operands, in place of the folded ones
        call = call._replace(
            operands=call.x.new_empty((2, call.weight.shape[0]), dtype=torch.float32).unbind(0)
        )
    asking = beside.Asking(call, order, memory.number)
    return asking.run(entry.ask_with_moments, tensors, circumstances, *memory)


def _without_moments(call: LinearCall, fold: tuple[Any, ...] | None, precision: str | None) -> Tensor:
    tensors = (call.epilogue, call.x, call.weight, tuple(call.operands), fold)
    found = entry.linear(*tensors, precision, None, call.pack_use, call.strict, False)
    if isinstance(found, Tensor):
        return found
    return deeds.linear(call, fold=None if fold is None else _checked(call, fold))


def _checked(call: LinearCall, fold: tuple[Any, ...]) -> FoldCall:
    checks.linear(call._replace(epilogue=BIAS, operands=fold[:1]))
    return checks.fold_batch_norm(call.x, fold[:-1], fold[-1], call.weight.shape[0])
