"""Batch-invariant calls that csrc/call cannot run. It chooses their kernel by N, K, dtype and precision alone.

Each result is the same sequence of operations, whatever its row: one tile of the Hopper kernels, on the tensors as they
are or on fp16 slices, or fp32 multiply-adds. Where the kernel cannot read or write the tensors, copies of them are
multiplied, padded with zeros to what TMA asks for. On a CPU each row is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from epigemm import decisions, fallback, kernels, linker, plans, split
from epigemm import precision as _precision
from epigemm.calls import LinearCall
from epigemm.epilogues import MATRIX, PER_COLUMN, PER_ROW

_TMA_BYTES = 16


def runs_by_rows(call: LinearCall) -> bool:
    """Whether each row is a call of its own: on a CPU. Of a GPU the question makes it known to the planner."""
    return not plans.has_gpu_kernels(call.x) and call.x.is_cpu


def why_none(call: LinearCall) -> str:
    """Why no kernel computes a call that is not empty in a fixed order, not even on copies; empty where one does."""
    x = call.x
    if runs_by_rows(call):
        return ""
    if reason := kernels.why_none(x) or plans.no_gemm_kernels():
        return reason
    if x.dtype == torch.float64:
        return "fused kernels exist for float16, bfloat16 and float32, not for float64"
    tried = explain_on_copies(call)
    if not any(each["runs"] for each in tried):
        return str(tried[0]["plan"]["why_not_covered"])
    missing = decisions.missing_kernels(_on_meta(call), decisions.fp32_code(call), 0, x)
    return linker.would_link(call.epilogue, missing, x.device)


def refuse(x: Tensor, reason: str) -> NoReturn:
    """Raise RuntimeError: PyTorch's GEMM is no answer here."""
    got = f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
    raise RuntimeError(
        f"x: got {got} in the batch-invariant mode, where no kernel computes "
        f"it in a fixed order ({reason}); accepted there are float16, bfloat16 and float32 on a Hopper GPU, and "
        "tensors on a CPU"
    )


def explain_on_copies(call: LinearCall) -> list[dict[str, Any]]:
    """What `decisions.explain` says is tried for the call on copies; makes none."""
    tried: list[dict[str, Any]] = decisions.explain(_on_meta(call), decisions.fp32_code(call), 0, call.x)[
        "tried"
    ]
    return tried


def _on_meta(call: LinearCall) -> LinearCall:
    return _on_copies(call, lambda tensor, sizes: tensor.new_empty(sizes, device="meta"))


def on_copies(call: LinearCall) -> LinearCall:
    """The call on copies that its kernel can read, with an `out` that it can write, wider than the call's."""
    return _on_copies(call, _with_zeros)


def _on_copies(call: LinearCall, copy: Callable[[Tensor, Sequence[int]], Tensor]) -> LinearCall:
    # Zeros add nothing to a sum, and copies change no bits: these results are those of tensors that TMA can read.
    m, (n, k) = call.rows, call.weight.shape
    is_by_tma = call.x.dtype != torch.float32 or decisions.roads(call).fused[0] == _precision.TF32
    step = _TMA_BYTES // call.x.element_size() if is_by_tma else 1
    width, depth = n + -n % step, k + -k % step
    sizes = {PER_COLUMN: (width,), MATRIX: (m, width), PER_ROW: (m, 1)}
    operands = zip(call.operands, call.kinds, strict=True)
    return call._replace(
        x=copy(call.x, (m, depth)),
        weight=copy(call.weight, (width, depth)),
        bias=None if call.bias is None else copy(call.bias, (width,)),
        operands=[copy(operand, sizes.get(kind, ())) for operand, kind in operands],
        out=call.x.new_empty((m, width)) if copy is _with_zeros else copy(call.x, (m, width)),
    )


def _with_zeros(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """A contiguous copy of these sizes."""
    if tensor.dim() != len(sizes):  # x, of any leading dimensions
        tensor = tensor.reshape(sizes[0], tensor.shape[-1])
    more = [size - length for size, length in zip(sizes, tensor.shape, strict=True)]
    return torch.nn.functional.pad(
        tensor, [each for last in reversed(more) for each in (0, last)]
    ).contiguous()


def row_by_row(call: LinearCall) -> Tensor:
    """Each row alone, always at the same addresses: math libraries choose their code by the alignment of operands."""
    x, (n, k) = call.x, call.weight.shape
    out = call.new_out() if call.out is None else call.out
    rows = x.reshape(-1, k)
    target = out.view(-1, n) if split.flattens(out) else out.new_empty((len(rows), n))
    row, result = x.new_empty((1, k)), x.new_empty((1, n))
    of_row = call._replace(x=row, out=result)
    for index in range(len(rows)):
        row.copy_(rows[index : index + 1])
        operands = [
            operand[index : index + 1] if kind in (PER_ROW, MATRIX) else operand
            for operand, kind in zip(call.operands, call.kinds, strict=True)
        ]
        fallback.linear(of_row._replace(operands=operands))
        target[index : index + 1].copy_(result)
    if not split.flattens(out):
        out.copy_(target.view(out.shape))
    return out
