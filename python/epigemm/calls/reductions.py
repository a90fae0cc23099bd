"""Reductions of a matrix along one axis, by PyTorch's operators: in a fixed order, differentiable any number of times.

In the batch-invariant mode a sum along a row is a tree of sums of two numbers: the order of PyTorch's depends on how
many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.calls.log import current
from epigemm.epilogues.registry import compute_dtype
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, SUM, VAR


def reduce(
    matrix: Tensor, kind: str, axis: int, correction: float, invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """A reduction of `[M, N]` along an axis, in fp32 (fp64 of fp64); with the variance comes the mean.

    `kind`: of `results.REDUCTIONS`; `correction`: of the variance; `invariant`: a row's bits depend on no other row.
    """
    if current.log is not None:
        return current.log.made(reduce, matrix, kind, axis, correction, invariant)  # type: ignore[no-any-return]
    if invariant and axis == 1:
        return _of_rows(matrix, kind, correction)
    wide = compute_dtype(matrix.dtype)
    # All kinds but the variance are named after torch's methods.
    if kind in (SUM, MEAN):
        return getattr(matrix, kind)(axis, dtype=wide), None
    if kind in (AMAX, AMIN):
        return getattr(matrix, kind)(axis).to(wide), None
    return torch.var_mean(matrix.to(wide), axis, correction=correction)


def launches(kind: str, dtype: torch.dtype, *, invariant: bool) -> list[str]:
    """What `reduce` runs for a matrix of this type."""
    if invariant and kind not in (AMAX, AMIN):
        return [f"{kind}, as sums of two numbers: one kernel for each halving of the columns"]
    name = "var_mean" if kind == VAR else kind
    wide = compute_dtype(dtype)
    cast = f"cast to {str(wide).removeprefix('torch.')}"
    if wide is dtype or kind in (SUM, MEAN):
        return [name]
    return [name, cast] if kind in (AMAX, AMIN) else [cast, name]


def _of_rows(matrix: Tensor, kind: str, correction: float) -> tuple[Tensor, Tensor | None]:
    wide, columns = compute_dtype(matrix.dtype), matrix.shape[1]
    if kind in (AMAX, AMIN):
        # Of two zeros the order would choose one: the sum is 0.
        return getattr(matrix, kind)(1).to(wide) + 0.0, None
    total = _tree(matrix.to(wide))
    if kind == SUM:
        return total, None
    mean = total / columns if columns else total / total
    if kind == MEAN:
        return mean, None
    deviations = matrix.to(wide) - mean.unsqueeze(1)
    freedom = max(columns - correction, 0.0)
    squares = _tree(deviations * deviations)
    return squares / squares.new_full((), freedom), mean


def _tree(matrix: Tensor) -> Tensor:
    """The sum of each row: halves are added, then halves of the sums."""
    while matrix.shape[1] > 1:
        half = matrix.shape[1] // 2
        folded = matrix[:, :half] + matrix[:, half : 2 * half]
        odd = matrix[:, 2 * half :]
        matrix = torch.cat((folded, odd), 1) if odd.shape[1] else folded
    return matrix.sum(1)
