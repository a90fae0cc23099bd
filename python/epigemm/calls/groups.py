"""Products of rows in groups that no fused kernel computes: by PyTorch's batched or grouped product, else by a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall, tensors_of
from epigemm.compilers import in_forward_mode, is_batched, is_faked, is_traced, is_transformed, keeps_numbers
from epigemm.epilogues.kinds import KINDS, PER_COLUMN, OperandKind
from epigemm.epilogues.registry import Epilogue, Operands

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ROW_BYTES = 16


def of_call(call: LinearCall) -> Tensor:
    """A call whose arguments have been checked."""
    result = reference(call)
    return result if call.out is None else write(call, result)


def write(call: LinearCall, result: Tensor) -> Tensor:
    """Copy a result to the call's `out`, but for the rows behind the last group, which `out` keeps."""
    assert call.out is not None
    if call.group_ends is None:
        return call.out.copy_(result)
    rows = torch.arange(call.rows, device=call.x.device)
    is_in_group = rows < _clamped(call.group_ends, call.rows)[-1]
    return call.out.copy_(torch.where(is_in_group[:, None], result, call.out))


def check(call: LinearCall) -> None:
    """Check the arguments; RuntimeError in the batch-invariant mode."""
    checks.arguments(call)
    if call.invariant:
        raise RuntimeError(
            "weight: got a matrix for each group of rows in the batch-invariant mode, where no kernel computes them in "
            "a fixed order; accepted there is one matrix"
        )


def readable(call: LinearCall) -> LinearCall:
    """The call as kernels read it: with the vectors of all groups without gaps."""
    pairs = zip(call.operands, call.epilogue.operands, strict=True)
    operands = [
        value.contiguous() if KINDS[spec.kind].is_of_columns and isinstance(value, Tensor) else value
        for value, spec in pairs
    ]
    return call._replace(operands=tuple(operands))


def refuse(call: LinearCall) -> None:
    """Raise for what is not accepted of a call that autograd records or a compiler traces."""
    if call.strict:
        raise RuntimeError(
            "strict: got True with a weight of several matrices in a recorded or traced call, of which no kernel "
            "computes more than the product; accepted there is False"
        )
    if call.out is not None:
        raise RuntimeError(
            "out: got a tensor with a weight of several matrices in a recorded or traced call; accepted there is None"
        )


def launches(call: LinearCall) -> list[str]:
    """What `of_call` launches, in words."""
    takes = call.group_ends is not None and _takes(call.x, call.weight)
    others = "for each group: torch GEMM (mm)" if call.group_ends is not None else "torch batched GEMM (bmm)"
    product = "torch grouped GEMM (grouped_mm)" if takes else others
    return [product, *([] if call.epilogue.is_bias else [f"PyTorch reference, {call.epilogue.name}"])]


class Steps(NamedTuple):
    """What a call is made of.

    Attributes:
        multiply: as `product`.
        with_gradient: of a matrix and which rows are those of groups: the gradient of the other rows is 0.
        apply: as `Epilogue.reference`.
    """

    multiply: Callable[..., Tensor]
    with_gradient: Callable[[Tensor, Tensor], Tensor]
    apply: Callable[[Epilogue, Tensor, Operands], Tensor]


def reference(call: LinearCall, steps: Steps | None = None) -> Tensor:
    """D[m] = epilogue(x[m] @ weight[g].T) with the group g of row m, by PyTorch's operators, which may be recorded.

    Or D[g] = epilogue(x[g] @ weight[g].T).

    What is behind the last group is undefined, and has no gradient: that ends where the operands enter.
    """
    epilogue, x, weight, operands, *_ = call
    steps = steps or Steps(product, lambda matrix, is_own: torch.where(is_own, matrix, 0), Epilogue.reference)
    bias, behind = epilogue.bias_among(operands), epilogue.without_bias(operands)
    kinds = [KINDS[spec.kind] for spec in epilogue.operands]
    if call.group_ends is None:
        z = torch.bmm(x, weight.transpose(1, 2))
        z = z if bias is None else z + bias[:, None]
        of_groups = tuple(
            value[:, None] if isinstance(value, Tensor) and kind.is_of_columns else value
            for value, kind in zip(behind, kinds, strict=True)
        )
        return z if epilogue.is_bias else steps.apply(epilogue, z, of_groups)
    rows, ends = len(x), _clamped(call.group_ends, len(x))
    inputs = (x, weight, *tensors_of(operands))
    is_recorded = is_transformed() or (torch.is_grad_enabled() and any(each.requires_grad for each in inputs))
    numbers = torch.arange(rows, device=x.device)
    is_own = (numbers < ends[-1])[:, None] if is_recorded else None

    def entered(matrix: Tensor) -> Tensor:
        if is_own is None or not (matrix.requires_grad or is_transformed()):
            return matrix
        return steps.with_gradient(matrix, is_own)

    def of_rows(value: Any, kind: OperandKind) -> Any:
        """An operand as rows read it. Of vectors, those behind the last group read zeros."""
        if not isinstance(value, Tensor):
            return value
        if kind.is_of_columns:
            return torch.nn.functional.pad(value, (0, 0, 0, 1))[group_of(numbers, ends)]
        if not (is_recorded and (value.requires_grad or is_transformed())):
            return value
        return entered(value.expand(rows, value.shape[-1] if value.dim() else 1))

    z = steps.multiply(entered(x), weight, ends, is_recorded=is_recorded)
    if bias is not None:
        z = z + of_rows(bias, KINDS[PER_COLUMN])
    return z if epilogue.is_bias else steps.apply(epilogue, z, tuple(map(of_rows, behind, kinds)))


def group_of(rows: Tensor, ends: Tensor) -> Tensor:
    """The group of each row by its number; their count behind the last end. `ends` do not fall."""
    return torch.searchsorted(ends, rows, right=True, out_int32=True)


def product(x: Tensor, weight: Tensor, ends: Tensor, *, is_recorded: bool) -> Tensor:
    """The rows of each group times its weight; `ends` do not fall. In fp32 PyTorch copies them to the host."""
    # Its derivative reads rows as long as the result's.
    is_result_whole = weight.shape[1] * x.element_size() % _ROW_BYTES == 0
    if _takes(x, weight) and (is_result_whole or not is_recorded):
        result: Tensor = _grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return result
    if not x.shape[0] or x.is_meta:
        return torch.nn.functional.linear(x, weight[0])
    if not _may_be_read(ends):
        return _product_of_all_rows(x, weight, ends)
    begins = [0, *ends.tolist()]
    parts = [
        torch.nn.functional.linear(x[begin:end], matrix)
        for begin, end, matrix in zip(begins, begins[1:], weight, strict=False)
    ]
    rest = x.new_zeros(x.shape[0] - begins[-1], weight.shape[1])
    result = torch.cat([*parts, rest])
    # A compiler does not know how many rows the parts have together.
    return x.new_empty(x.shape[0], weight.shape[1]).copy_(result) if is_traced() or is_faked() else result


def gradient_of_weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Of each group's weight: its rows of the product's gradient, times those of x."""
    if _grouped_mm is not None and x.dtype in _DTYPES and _is_whole(x) and _is_whole(grad):
        result: Tensor = _grouped_mm(grad.mT, x, offs=ends)
        return result
    begins = [0, *ends.tolist()]
    return torch.stack([grad[begin:end].mT @ x[begin:end] for begin, end in itertools.pairwise(begins)])


def _product_of_all_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same by a product of each weight and all rows, with zeros in place of those of other groups."""
    parts, group = [], group_of(torch.arange(len(x), device=x.device), ends)
    for number, matrix in enumerate(weight):
        is_own = (group == number)[:, None]
        product = torch.nn.functional.linear(torch.where(is_own, x, 0), matrix)
        parts.append(torch.where(is_own, product, 0))
    return torch.stack(parts).sum(0)


def _may_be_read(ends: Tensor) -> bool:
    """Whether a tensor's numbers are those of each run: not where vmap has several, or a tracer would keep these."""
    if is_traced():
        return not is_transformed()
    return not (keeps_numbers() or is_batched(ends))


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product computes them."""
    dtypes = _DTYPES if _has_memory(x) else (torch.bfloat16,)  # its fake kernel knows one type
    is_weight_whole = _is_whole(weight) or _is_whole(weight.transpose(-2, -1))
    if _grouped_mm is None or in_forward_mode():  # it has no derivative there
        return False
    return x.shape[0] > 0 and x.dtype in dtypes and _is_whole(x) and is_weight_whole


def _clamped(ends: Tensor, rows: int) -> Tensor:
    """Ends that lead to no row outside x: one that falls is the end before it, as in the kernels."""
    return ends.clamp(0, rows).cummax(0).values


def _has_memory(tensor: Tensor) -> bool:
    return not is_traced() and not tensor.is_meta and checks.has_memory(tensor)


def _is_whole(matrix: Tensor) -> bool:
    """Whether PyTorch's product takes a matrix, or one for each group: its rows are whole 16 bytes."""
    stride, size = matrix.stride(-2), matrix.element_size()
    is_aligned = not _has_memory(matrix) or matrix.data_ptr() % _ROW_BYTES == 0
    is_row_major = matrix.stride(-1) == 1 and stride >= matrix.shape[-1]
    return is_row_major and stride * size % _ROW_BYTES == 0 and is_aligned
