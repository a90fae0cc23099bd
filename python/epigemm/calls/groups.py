"""Products of rows in groups that no fused kernel computes: PyTorch's grouped product where it runs, else a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.registry import Epilogue, Operands

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
_ROW_BYTES = 16  # what PyTorch's asks of rows and addresses


def of_call(call: LinearCall) -> Tensor:
    """A call whose arguments have been checked."""
    assert call.group_ends is not None
    result = reference(call.epilogue, call.x, call.weight, call.operands, call.group_ends)
    if call.out is None:
        return result
    rows = torch.arange(call.rows, device=call.x.device)
    is_in_group = rows < _clamped(call.group_ends, call.rows)[-1]
    return call.out.copy_(torch.where(is_in_group[:, None], result, call.out))


def reference(epilogue: Epilogue, x: Tensor, weight: Tensor, operands: Operands, ends: Tensor) -> Tensor:
    """D[m] = epilogue(x[m] @ weight[g].T) with the group g of row m, by PyTorch's operators, which may be recorded.

    What is behind the last group is undefined.
    """
    ends = _clamped(ends, x.shape[0])
    rows = torch.arange(x.shape[0], device=x.device)
    group = torch.searchsorted(ends, rows, right=True, out_int32=True).clamp(max=weight.shape[0] - 1)
    bias, behind = epilogue.bias_among(operands), epilogue.without_bias(operands)
    z = product(x, weight, ends)
    if bias is not None:
        z = z + bias[group]
    pairs = zip(epilogue.operands, behind, strict=True)
    of_rows = [
        value[group] if isinstance(value, Tensor) and _is_of_columns(spec.kind) else value
        for spec, value in pairs
    ]
    return epilogue.reference(z, of_rows)  # type: ignore[no-any-return]


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The rows of each group times its weight; `ends` do not fall. PyTorch's own copies fp32's ends to the host."""
    if x.is_cuda and _grouped_mm is not None and _takes(x) and _takes(weight):
        result: Tensor = _grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return result
    begins = [0, *ends.tolist()]
    parts = [
        torch.nn.functional.linear(x[begin:end], matrix)
        for begin, end, matrix in zip(begins, begins[1:], weight, strict=False)
    ]
    rest = x.new_zeros(x.shape[0] - begins[-1], weight.shape[1])
    return torch.cat([*parts, rest])


def _clamped(ends: Tensor, rows: int) -> Tensor:
    """Ends that lead to no row outside x: one that falls is the end before it, as in the kernels."""
    return ends.clamp(0, rows).cummax(0).values


def _is_of_columns(kind: str) -> bool:
    return KINDS[kind].by_column and not KINDS[kind].by_row


def _takes(matrix: Tensor) -> bool:
    is_row_major = matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1]
    is_aligned = matrix.stride(-2) * matrix.element_size() % _ROW_BYTES == 0 == matrix.data_ptr() % _ROW_BYTES
    return matrix.dtype is torch.bfloat16 and is_row_major and is_aligned
