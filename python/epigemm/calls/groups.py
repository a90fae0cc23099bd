"""Products of rows in groups that no fused kernel computes: PyTorch's grouped product where it runs, else a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.compilers import is_traced
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.registry import Epilogue, Operands

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ROW_BYTES = 16


def of_call(call: LinearCall) -> Tensor:
    """A call whose arguments have been checked."""
    assert call.group_ends is not None
    result = reference(call.epilogue, call.x, call.weight, call.operands, call.group_ends)
    if call.out is None:
        return result
    rows = torch.arange(call.rows, device=call.x.device)
    is_in_group = rows < _clamped(call.group_ends, call.rows)[-1]
    return call.out.copy_(torch.where(is_in_group[:, None], result, call.out))


def launches(call: LinearCall) -> list[str]:
    """What `of_call` launches, in words."""
    takes = _takes(call.x, call.weight)
    product = "torch grouped GEMM (grouped_mm)" if takes else "for each group: torch GEMM (mm)"
    return [product, *([] if call.epilogue.is_bias else [f"PyTorch reference, {call.epilogue.name}"])]


def reference(epilogue: Epilogue, x: Tensor, weight: Tensor, operands: Operands, ends: Tensor) -> Tensor:
    """D[m] = epilogue(x[m] @ weight[g].T) with the group g of row m, by PyTorch's operators, which may be recorded.

    What is behind the last group is undefined, and has no gradient.
    """
    ends = _clamped(ends, x.shape[0])
    rows = torch.arange(x.shape[0], device=x.device)
    if x.requires_grad:
        x = torch.where(
            (rows < ends[-1])[:, None], x, 0
        )  # PyTorch's product leaves the others' gradient undefined
    group = torch.searchsorted(ends, rows, right=True, out_int32=True).clamp(max=weight.shape[0] - 1)
    bias, behind = epilogue.bias_among(operands), epilogue.without_bias(operands)
    z = _product(x, weight, ends)
    if bias is not None:
        z = z + bias[group]
    pairs = zip(epilogue.operands, behind, strict=True)
    of_rows = [
        value[group] if isinstance(value, Tensor) and KINDS[spec.kind].is_of_columns else value
        for spec, value in pairs
    ]
    return epilogue.reference(z, of_rows)


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The rows of each group times its weight; `ends` do not fall. In fp32 PyTorch copies them to the host."""
    if _takes(x, weight):
        result: Tensor = _grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return result
    begins = [0, *ends.tolist()]
    parts = [
        torch.nn.functional.linear(x[begin:end], matrix)
        for begin, end, matrix in zip(begins, begins[1:], weight, strict=False)
    ]
    rest = x.new_zeros(x.shape[0] - begins[-1], weight.shape[1])
    return torch.cat([*parts, rest])


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product computes them."""
    dtypes = (torch.bfloat16,) if is_traced() else _DTYPES  # its fake kernel knows one type
    is_weight_whole = _is_whole(weight) or _is_whole(weight.transpose(-2, -1))
    return _grouped_mm is not None and x.dtype in dtypes and _is_whole(x) and is_weight_whole


def _clamped(ends: Tensor, rows: int) -> Tensor:
    """Ends that lead to no row outside x: one that falls is the end before it, as in the kernels."""
    return ends.clamp(0, rows).cummax(0).values


def _is_whole(matrix: Tensor) -> bool:
    """Whether PyTorch's product takes a matrix, or one for each group: its rows are whole 16 bytes."""
    stride, size = matrix.stride(-2), matrix.element_size()
    is_aligned = is_traced() or matrix.data_ptr() % _ROW_BYTES == 0
    is_row_major = matrix.stride(-1) == 1 and stride >= matrix.shape[-1]
    return is_row_major and stride * size % _ROW_BYTES == 0 and is_aligned
