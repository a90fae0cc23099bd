"""The batch-invariant mode: each result is the same sequence of operations, whatever its row.

These are one fixed tile of a family of kernels, or fp32 multiply-adds. If the kernel cannot read or write the tensors,
it runs on copies, padded with zeros to the alignment of TMA. On a CPU each row is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import EightBits, LinearCall, blocks_of
from epigemm.calls import elementwise_kernels
from epigemm.calls.layouts import flattens
from epigemm.epilogues.kinds import KINDS
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun

_TMA_BYTES = 16


def refuse(call: LinearCall) -> None:
    """RuntimeError if no kernel computes the call in a fixed order, not even on copies. Empty calls are accepted."""
    if reason := why_none(call):
        refuse_because(call.x, reason)


def refuse_because(x: Tensor, reason: str) -> NoReturn:
    """Raise the RuntimeError of a call that only PyTorch's GEMM could compute."""
    got = f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
    raise RuntimeError(
        f"x: got {got} in the batch-invariant mode, where no kernel computes "
        f"it in a fixed order ({reason}); accepted there are float16, bfloat16 and float32 on a GPU with fused "
        "kernels for them, and tensors on a CPU"
    )


def why_none(call: LinearCall) -> str:
    """Why no kernel computes a call in a fixed order; empty if one does."""
    x = call.x
    if runs_by_rows(call):
        return ""
    if reason := elementwise_kernels.why_none(x) or plans.no_gemm_kernels():
        return reason
    if x.dtype == torch.float64:
        return "fused kernels exist for float16, bfloat16 and float32, not for float64"
    found = consider_copies(call)
    if not found.fused:
        last = found.tried[-1]  # those before it may be covered, and not accurate enough
        return str(last.plan["why_not_covered"] or last.why_not)
    return loader.would_link(call.epilogue, ",".join(found.missing), x.device)


def runs_by_rows(call: LinearCall) -> bool:
    """Whether each row is a call of its own, as on a CPU. For a GPU, this also makes it known to the planner."""
    return not plans.has_gpu_kernels(call.x) and call.x.is_cpu


def consider_copies(call: LinearCall) -> DryRun:
    """A dry run of the call on copies of its tensors, which are not made. Kernels on fp16 slices need no copies."""
    on_meta = _on_copies(call, lambda tensor, sizes: tensor.new_empty(sizes, device="meta"))
    return dry_runs.dry_run(on_meta, place=call.x, tried=True)


def on_zeros(call: LinearCall) -> LinearCall:
    """The call on copies of its tensors, padded with zeros, and with its own `out`."""
    return _on_copies(call, _with_zeros)._replace(out=None)


def _on_copies(call: LinearCall, copy: Callable[[Tensor, Sequence[int]], Tensor]) -> LinearCall:
    # Zeros add nothing to a sum, and copies change no bits: these results are those of tensors that TMA can read.
    n, k = call.weight.shape
    is_by_tma = call.x.dtype != torch.float32 or call.order.fused[0] == _precision.TF32
    # In 8 bits K is whole, and rows of results are padded elsewhere.
    step = _TMA_BYTES // call.x.element_size() if is_by_tma and call.eight_bits is None else 1
    width, depth = n + -n % step, k + -k % step
    pairs = [*zip(call.operands, (each.kind for each in call.epilogue.operands), strict=True)]
    shapes = [(each.shape, kind) for each, kind in pairs if isinstance(each, Tensor)]
    is_shared = any(KINDS[kind].shares_rows(shape, call.x.shape[:-1], n) for shape, kind in shapes)
    # A matrix with a row for several of x's needs x's leading axes.
    lead = tuple(call.x.shape[:-1]) if is_shared else (call.rows,)
    return call._replace(
        x=copy(call.x, (*lead, depth)),
        weight=copy(call.weight, (width, depth)),
        operands=[
            copy(operand, KINDS[kind].shape(operand.shape[:-1] if is_shared else lead, width))
            if isinstance(operand, Tensor)
            else operand
            for operand, kind in pairs
        ],
        out=None,
    )


def _with_zeros(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """A contiguous copy of these sizes."""
    if tensor.dim() != len(sizes):  # with any leading dimensions
        tensor = tensor.reshape(sizes[0], tensor.shape[-1])
    more = [size - length for size, length in zip(sizes, tensor.shape, strict=True)]
    return torch.nn.functional.pad(
        tensor, [each for last in reversed(more) for each in (0, last)]
    ).contiguous()


def row_of(operand: Tensor, index: int, rows: int) -> Tensor:
    """The row that a row of the result reads: a matrix may have one for several."""
    every = operand.reshape(-1, operand.shape[-1])
    place = index * len(every) // rows
    return every[place : place + 1]


def _of_row(eight_bits: EightBits | None, index: int) -> EightBits | None:
    if eight_bits is None:
        return None
    if eight_bits.x_scale is not None and eight_bits.x_scale.dim():
        eight_bits = eight_bits._replace(x_scale=eight_bits.x_scale[index : index + 1])
    blocks = blocks_of(eight_bits.out_scale)
    return eight_bits if blocks is None else eight_bits._replace(out_scale=blocks[:, index : index + 1])


def row_by_row(call: LinearCall, run: Callable[[LinearCall], Tensor]) -> Tensor:
    """Each row alone, always at the same address, because math libraries choose code by the alignment of operands."""
    x, (n, k) = call.x, call.weight.shape
    out = call.new_out() if call.out is None else call.out
    rows = x.reshape(call.rows, k)
    target = out.view(call.rows, n) if flattens(out) and out.dim() > 1 else out.new_empty((len(rows), n))
    row, result = x.new_empty((1, k)), out.new_empty((1, n))
    of_row = call._replace(x=row, out=result, invariant=False)
    for index in range(len(rows)):
        row.copy_(rows[index : index + 1])
        operands = [
            row_of(value, index, call.rows)
            if isinstance(value, Tensor) and KINDS[about.kind].by_row
            else value
            for about, value in zip(call.epilogue.operands, call.operands, strict=True)
        ]
        run(of_row._replace(operands=operands, eight_bits=_of_row(call.eight_bits, index)))
        target[index : index + 1].copy_(result)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
