"""The road of a batch-invariant call: every choice is made by N, K, dtype and precision, and none by M.

Each result is the same sequence of operations, whatever its row and tile: one tile of the Hopper kernels, on
the tensors as they are or on fp16 pieces, or IEEE fp32 multiply-adds. Where TMA could not read or write the tensors,
copies of them, padded with zeros, are multiplied. On a CPU each row is a call of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epigemm import decisions, fallback, kernels, plans, split
from epigemm import precision as _precision
from epigemm._native import ops
from epigemm.calls import LinearCall
from epigemm.epilogues import MATRIX, PER_COLUMN, PER_ROW
from epigemm.linked import LinkedEpilogue

TENSORS = "tensors"  # 16 bits and TF32: the tensors as they are
PIECES = "pieces"  # fp32 on fp16 pieces
FP32 = "fp32"  # fp32 in multiply-adds
ROWS = "rows"  # a CPU, row by row
EMPTY = "empty"  # no products at all

_TMA_BYTES = 16
_ORDER = {
    _precision.SCALED: (_precision.SCALED, _precision.SPLIT, _precision.IEEE),
    _precision.SPLIT: (_precision.SPLIT, _precision.IEEE),
    _precision.TF32: (_precision.TF32,),
    _precision.IEEE: (_precision.IEEE,),
}
"""What an fp32 call runs on, by what it asks for: the first that is accurate enough for its K."""
_fused_linear_out = ops._fused_linear_out.default
_fp32_linear_out = ops._fp32_linear_out.default


class Road(NamedTuple):
    """How a batch-invariant call runs.

    Attributes:
        kind: one of this module's constants.
        arithmetic: what fp32 operands are multiplied in.
        plan: dispatch's answer, where it was asked.
        passed_over: why an arithmetic that comes before is not used: words about K.
    """

    kind: str
    arithmetic: str = _precision.IEEE
    plan: dict[str, Any] = {}  # noqa: RUF012
    passed_over: tuple[str, ...] = ()


def choose(call: LinearCall) -> Road:
    """How a call runs in the batch-invariant mode; launches nothing.

    Raises:
        RuntimeError: nothing there computes it in a fixed order.
    """
    x, (n, k), m = call.x, call.weight.shape, call.rows
    if not m or not n or not k:
        return Road(EMPTY)
    if x.is_cpu and not plans.has_gpu_kernels(x):
        return Road(ROWS)
    if reason := kernels.why_none(x) or plans.no_gemm_kernels():
        _refuse(x, reason)
    if x.dtype == torch.float64:
        _refuse(x, "fused kernels exist for float16, bfloat16 and float32, not for float64")
    sizes = (call.epilogue.name, m, n, k)
    if x.dtype != torch.float32:
        return _on_tensors(x, sizes, _precision.IEEE)
    asked = decisions.roads(call).fused[0]
    return _on_tensors(x, sizes, asked) if asked == _precision.TF32 else _fp32_road(x, sizes, asked)


def _on_tensors(x: Tensor, sizes: tuple[str, int, int, int], arithmetic: str) -> Road:
    epilogue, m, n, k = sizes
    aligned = (epilogue, m, _padded(n, x.dtype), _padded(k, x.dtype))
    plan = plans.invariant_plan(*aligned, str(x.dtype).removeprefix("torch."), arithmetic, x.get_device())
    if plan["why_not_covered"]:
        _refuse(x, plan["why_not_covered"])
    return Road(TENSORS, arithmetic, plan)


def _fp32_road(x: Tensor, sizes: tuple[str, int, int, int], asked: str) -> Road:
    device = x.get_device()
    # The limits of the fp32 kernel are those of the pieces.
    if reason := plans.invariant_plan(*sizes, "float32", _precision.SPLIT, device)["why_not_covered"]:
        _refuse(x, reason)
    passed_over: list[str] = []
    for arithmetic in _ORDER[asked]:
        if arithmetic == _precision.IEEE:
            break
        plan = plans.invariant_plan(*sizes, "float32", arithmetic, device)
        if not plan["why_not"]:
            return Road(PIECES, arithmetic, plan, tuple(passed_over))
        passed_over.append(plan["why_not"])
    return Road(FP32, _precision.IEEE, {}, tuple(passed_over))


def _refuse(x: Tensor, reason: str) -> NoReturn:
    got = f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
    raise RuntimeError(
        f"x: got {got} in the batch-invariant mode, where no kernel computes "
        f"it in a fixed order ({reason}); accepted there are float16, bfloat16 and float32 on a Hopper GPU, and "
        "tensors on a CPU"
    )


def linear(road: Road, call: LinearCall) -> Tensor:
    """Run a call that is not empty, with bits that do not depend on M.

    Raises:
        torch.OutOfMemoryError: no memory for the result, for copies or for fp16 pieces.
    """
    out = call.new_out() if call.out is None else call.out
    call = call._replace(out=out)
    if isinstance(call.epilogue, LinkedEpilogue) and road.kind != ROWS:
        _link(call.epilogue, road, call)
    if road.kind == ROWS:
        _row_by_row(call, out)
    elif road.kind == PIECES:
        _run_on_pieces(road, call, out)
    elif road.kind == FP32:
        _run_fp32(call, out)
    else:
        _run_on_tensors(road, call, out)
    return out


def _link(epilogue: LinkedEpilogue, road: Road, call: LinearCall) -> None:
    """Link what the road runs; another one would have other bits."""
    plan = None if road.kind == FP32 else road.plan["plan"]
    missing = ops._missing_for_plan(epilogue.name, call.x, road.arithmetic, plan)
    if reason := epilogue.link(missing, call.x.device):
        _refuse(call.x, reason)


def _run_on_tensors(road: Road, call: LinearCall, out: Tensor) -> None:
    epilogue, x, weight, bias, operands, scalars, *_ = call
    how = (scalars, road.arithmetic, road.plan["plan"])
    if _fused_linear_out(epilogue.name, x, weight, bias, operands, *how, out):
        return
    # Zeros add nothing to a sum, and copies change no bits: these results are those of tensors that TMA can read.
    n, k = weight.shape
    width, depth = _padded(n, x.dtype), _padded(k, x.dtype)
    target = torch.empty((call.rows, width), dtype=out.dtype, device=out.device)
    ran = _fused_linear_out(
        epilogue.name,
        _with_zeros(x.reshape(-1, k), 0, depth - k),
        _with_zeros(weight, width - n, depth - k),
        None if bias is None else _with_zeros(bias, width - n),
        [
            _with_zeros(operand, *(0,) * (operand.dim() - 1), width - n)
            if kind in (PER_COLUMN, MATRIX)
            else operand
            for operand, kind in zip(operands, call.kinds, strict=True)
        ],
        *how,
        target,
    )
    if not ran:
        raise RuntimeError("x: got tensors that no fused kernel covers, even copied and padded to 16 bytes")
    out.copy_(target[:, :n].view(out.shape))


def _padded(size: int, dtype: torch.dtype) -> int:
    step = _TMA_BYTES // dtype.itemsize
    return -(-size // step) * step


def _with_zeros(tensor: Tensor, *more: int) -> Tensor:
    """A contiguous copy, `more` elements longer along each of its dimensions."""
    padding = [size for after in reversed(more) for size in (0, after)]
    return torch.nn.functional.pad(tensor, padding).contiguous()


def _run_on_pieces(road: Road, call: LinearCall, out: Tensor) -> None:
    choice, plan = split.choose_fixed(call, road.arithmetic, out), road.plan["plan"]
    try:
        split.run(choice, call, road.arithmetic, plan)
    except torch.OutOfMemoryError:
        if choice.source != split.MAKE:
            raise
        # Memory for one call may be there where memory to keep is not: the pieces are the same.
        split.run(choice._replace(source=split.PER_CALL), call, road.arithmetic, plan)


def _run_fp32(call: LinearCall, out: Tensor) -> None:
    target = _matrix_for(out)
    _fp32_linear_out(
        call.epilogue.name,
        call.x.reshape(-1, call.weight.shape[1]),
        call.weight,
        None if call.bias is None else call.bias.contiguous(),
        [operand.contiguous() for operand in call.operands],
        call.scalars,
        target,
    )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def _matrix_for(out: Tensor) -> Tensor:
    """`out` as one row-major matrix, or a new matrix where it is none."""
    if split.flattens(out):
        matrix = out.view(-1, out.shape[-1])
        if matrix.stride(1) == 1:
            return matrix
    return torch.empty((math.prod(out.shape[:-1]), out.shape[-1]), dtype=out.dtype, device=out.device)


def _row_by_row(call: LinearCall, out: Tensor) -> None:
    """Each row alone, always at the same addresses: math libraries choose their code by the alignment of operands."""
    x, (n, k) = call.x, call.weight.shape
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
