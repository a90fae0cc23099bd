"""Elementwise kernels outside of the calls of csrc/call, and on which devices epigemm's kernels run."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm._native import cuda_status, no_entry, operator, ops
from epigemm.arguments.calls import BLOCKS, FoldCall
from epigemm.arguments.eight_bits import RECIPES, RESULTS, blocks
from epigemm.calls.layouts import flattens
from epigemm.calls.log import current
from epigemm.compilers import is_faked, is_traced, is_transformed, keeps_numbers
from epigemm.epilogues.registry import Epilogue, compute_dtype, fold_batch_norm_reference
from epigemm.planner import plans

_fold_batch_norm_out, _quantise_out = operator("_fold_batch_norm_out"), operator("_quantise_out")


def has_native(x: Tensor) -> bool:
    """Whether epigemm's elementwise kernels run on x's device. If not, as on a CPU, PyTorch's operators do."""
    return not no_entry and x.is_cuda and plans.usable(x.get_device())


def why_none(x: Tensor) -> str:
    """Why epigemm's kernels, or on a CPU PyTorch's operators, do not run on x's device; empty if they do."""
    if no_entry:
        return no_entry.partition("; ")[0]
    if x.is_cuda:
        return cuda_status(x.get_device())
    return "" if x.is_cpu else f"x is on {x.device}; epigemm has kernels for CUDA and CPU"


def gpu(device: torch.device | str | None) -> torch.device:
    """A GPU that epigemm's kernels run on; None: the current one.

    Raises:
        RuntimeError: it is none.
    """
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        reason = "it is no GPU"
    elif not torch.cuda.is_available():
        reason = "no CUDA GPUs are available"
    else:
        like = torch.empty(0, device=place)
        if has_native(like):
            return like.device
        reason = why_none(like)
    raise RuntimeError(f"device: got {place}, where no kernel of epigemm's runs ({reason})")


class Kind(enum.IntEnum):
    """The elementwise kernels of an epilogue (csrc/elementwise/kernels.h)."""

    ELEMENTWISE = 0
    DERIVATIVE = 1
    DERIVATIVE_SUMS = 2


def missing(epilogue: Epilogue, x: Tensor, kind: Kind = Kind.ELEMENTWISE) -> str:
    """The name of the elementwise kernel that has to be linked for such an x (or grad); empty if none."""
    name: str = ops._missing_elementwise(epilogue.name, x, kind)
    return name


_LEAST_ROW_BYTES = 128  # of a derivative whose columns its kernel sums


def sums_columns(like: Tensor, columns: int) -> bool:
    """Whether the kernel of a derivative also sums the columns of what it computes, for so many of them.

    They have to be whole vectors of 16 bytes, and at least eight of them: a thread reads one of each row, and with
    fewer most threads would be idle. `like`: of the type and on the device of what it computes.
    """
    row_bytes = columns * like.element_size()
    return row_bytes >= _LEAST_ROW_BYTES and row_bytes % 16 == 0 and has_native(like)


def fold_batch_norm(call: FoldCall) -> Tensor:
    """The BatchNorm fold, `[2, columns]`: multiplier and offset in the epilogue's arithmetic type."""
    if current.log is not None:
        return current.log.made(fold_batch_norm, call)  # type: ignore[no-any-return]
    like, columns, vectors, eps = call
    if not has_native(like):
        return fold_batch_norm_reference(like, vectors, eps)
    folded = torch.empty((2, columns), dtype=compute_dtype(like.dtype), device=like.device)
    _fold_batch_norm_out(*vectors, eps, folded)
    return folded


_ROW = 16  # bytes, and elements of x
_MOST_BLOCKS = 2 * 65535  # of a row: a CTA has two of them, and CUDA's grids so many along their second axis


def quantised(x: Tensor, recipe: str) -> tuple[Tensor, Tensor] | None:
    """x in e4m3 and its fp32 scales by one kernel: as `eight_bits.by_recipe` makes them.

    None where PyTorch's operators have to: of one scale for all, on other devices, in programs that are traced or
    transformed, for an x of another class than Tensor, or that a kernel would have to copy first.
    """
    if recipe == RECIPES[0] or is_traced() or not x.is_cuda or not x.dim() or not x.numel():
        return None
    if type(x) not in (Tensor, Parameter) or x.dtype not in RESULTS[:3] or not has_native(x):
        return None
    if is_faked() or is_transformed() or keeps_numbers() or x.shape[-1] % _ROW or x.data_ptr() % _ROW:
        return None
    columns, each = x.shape[-1], blocks(x.shape[-1]) if recipe == BLOCKS else 1  # row
    if each > _MOST_BLOCKS or not flattens(x):
        return None
    rows = x.view(-1, columns)
    if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) * x.element_size() % _ROW):
        return None
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((each, len(rows)), dtype=torch.float32, device=x.device)
    _quantise_out(rows, out.view(-1, columns), scales)
    return out, scales.view(each, *x.shape[:-1]).movedim(0, -1)
