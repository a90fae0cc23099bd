"""fp32 products on fp16 pieces: whether a call runs there, with which pack of its weight, and the launch.

Everything here is about CUDA tensors whose device epigemm's kernels run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epigemm import packs, plans
from epigemm._native import ops
from epigemm.epilogues import Epilogue
from epigemm.precision import SCALED

KEPT = "kept"  # a current pack is at hand
KEEP = "keep"  # it is made now, and kept
PER_CALL = "per call"  # the weight is split into this call's workspace

_ROW_ALIGNMENT = 4  # elements: the kernels store 16 bytes at a time
_TMA_BYTES = 16
_split_linear_out = ops._split_linear_out.default


class Choice(NamedTuple):
    """How a call would run on fp16 pieces.

    Attributes:
        why_not: why it does not; empty where it does.
        source: where the weight's pieces come from: `KEPT`, `KEEP` or `PER_CALL`.
        pack: the weight's kept pack, current or not.
        plan: dispatch's answer.
        padded: whether the result is written to a padded temporary and copied.
    """

    why_not: str
    source: str
    pack: packs.KeptPack | None
    plan: plans.SplitPlan
    padded: bool


def choose(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Sequence[Tensor | None],
    arithmetic: str,
    out: Tensor,
    keep_pack: bool,
    *,
    reuse: bool = True,
) -> Choice:
    """Whether and how `epilogue(x @ weight.T)` runs on fp16 pieces; launches nothing.

    Args:
        epilogue: what follows the product.
        x: fp32 `[..., K]`.
        weight: fp32 `[N, K]`.
        operands: the bias and the further operands.
        arithmetic: "split" or "scaled".
        out: where the result goes, `[..., N]`.
        keep_pack: whether the weight belongs to someone who keeps its pack.
        reuse: whether a kept pack counts at all.
    """
    n, k = weight.shape
    device = x.get_device()
    m = out.numel() // n if n else 0

    def plan_for(packed: bool) -> plans.SplitPlan:
        return plans.split_plan(epilogue.name, m, n, k, packed, arithmetic, device)

    pack = packs.find(weight, packs.PIECES[arithmetic]) if reuse else None
    source, plan = _source(weight, pack, keep_pack, plan_for)
    if plan.why_not:
        return Choice(plan.why_not, source, pack, plan, False)
    padded = not _is_storable(out, m, n)
    why_not = ""
    if padded and plan.predicted_us + plans.copy_microseconds(m, n) > plan.second_path_us:
        why_not = "out is no matrix with rows of whole 16 bytes, and copying the result takes what was gained"
    elif arithmetic == SCALED:
        tf32 = _tf32_microseconds(epilogue, x, weight, operands, out, m)
        if tf32 < plan.predicted_us:
            why_not = (
                f"the fused TF32 kernel is expected to be faster ({tf32:.1f} us against {plan.predicted_us:.1f} us "
                "on scaled fp16)"
            )
    return Choice(why_not, source, pack, plan, padded)


def _source(
    weight: Tensor, pack: packs.KeptPack | None, keep_pack: bool, plan_for: Callable[[bool], plans.SplitPlan]
) -> tuple[str, plans.SplitPlan]:
    """Where the weight's pieces come from, and the plan that goes with it."""
    captured = (keep_pack or pack is not None) and packs.capturing(weight.device)
    if pack is not None and pack.is_current(weight) and (not captured or (keep_pack and pack.frozen)):
        return KEPT, plan_for(True)
    if not keep_pack or captured or weight.is_inference():
        return PER_CALL, plan_for(False)
    if pack is None:
        return KEEP, plan_for(True)  # made once, for many calls
    plan = plan_for(False)
    if plan.why_not and pack.is_settled(weight):
        plan = plan_for(True)  # stale, yet the weight stays as it is: worth it again
    return KEEP, plan


def run(
    choice: Choice,
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    arithmetic: str,
    out: Tensor,
) -> None:
    """Launch what `choose` has chosen.

    Raises:
        torch.OutOfMemoryError: no memory for pieces; nothing but perhaps the kept pack was written.
    """
    n, k = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    m = rows.shape[0]
    pieces = packs.PIECES[arithmetic]
    size = packs.pack_bytes(m, k, pieces)
    pack = choice.pack
    if choice.source == KEEP:
        pack = packs.keep(weight, pieces)
    elif choice.source == PER_CALL:
        pack = None
        size += packs.pack_bytes(n, k, pieces)
    workspace = _workspace(size, x)
    target = out
    if choice.padded:
        width = -(-n // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        target = torch.empty((m, width), dtype=out.dtype, device=out.device)
    elif out.dim() != 2:
        target = out.view(m, n)
    _split_linear_out(
        epilogue.name,
        rows,
        weight,
        None if pack is None else pack.read(),
        workspace,
        None if bias is None else bias.contiguous(),
        [operand.contiguous() for operand in operands],
        scalars,
        arithmetic,
        [],
        target,
    )
    if choice.padded:
        out.copy_(target[:, :n].view(out.shape))


def _workspace(size: int, x: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def declined(choice: Choice, weight: Tensor) -> None:
    """A call went elsewhere: a weight that stays as it is will be worth packing again."""
    if choice.source == KEEP and choice.pack is not None:
        choice.pack.see(weight)


_no_memory: tuple[int, int, int, str] | None = None  # the last call that found none, until it does again


def _call_key(x: Tensor, weight: Tensor, arithmetic: str) -> tuple[int, int, int, str]:
    return x.numel(), weight.shape[0], weight.shape[1], arithmetic


def ran_out_of_memory(x: Tensor, weight: Tensor, arithmetic: str) -> None:
    """Remember, for `explain`, that a call fell back for want of memory."""
    global _no_memory
    _no_memory = _call_key(x, weight, arithmetic)


def ran(x: Tensor, weight: Tensor, arithmetic: str) -> None:
    """A call ran on fp16 pieces."""
    global _no_memory
    if _no_memory is not None and _no_memory == _call_key(x, weight, arithmetic):
        _no_memory = None


def lacked_memory(x: Tensor, weight: Tensor, arithmetic: str) -> bool:
    """Whether the last call of these sizes found no memory for its pieces."""
    return _no_memory == _call_key(x, weight, arithmetic)


def describe_source(choice: Choice, weight: Tensor) -> str:
    """Where the weight's pieces come from, for people."""
    pack = choice.pack
    if choice.source == KEPT:
        return "the weight's pack is kept and current"
    if choice.source == KEEP and pack is None:
        return "the weight's pack is made by this call and kept"
    if choice.source == KEEP:
        return "the weight's pack is stale: the weight has changed; it is made again, into the same memory"
    if pack is None:
        return "the weight is split at every call: no pack of it is kept (epigemm.pack and modules keep one)"
    if packs.capturing(weight.device):
        return (
            "the weight is split inside of the CUDA graph, at every replay: its kept pack is stale, or was not made "
            "on purpose by repack()"
        )
    return "the weight is split at every call: its kept pack is stale, and this call does not keep one"


def describe_launches(choice: Choice, x: Tensor, gemm: str) -> list[str]:
    """Every launch of `run`, in order; `gemm` describes the kernel."""
    launches = []
    if x.dim() > 2 and not flattens(x):
        launches.append("torch copy of x: its leading dimensions are not one stride apart")
    if choice.source != KEPT:
        launches.append("epigemm CUDA kernel, split of weight into fp16 pieces")
    launches += [
        "epigemm CUDA kernel, split of x into fp16 pieces",
        gemm,
        "epigemm CUDA kernel, repair of what the range guard rejected (exits at once where that is nothing)",
    ]
    if choice.padded:
        launches.append("torch copy of the result: out is no matrix with rows of whole 16 bytes")
    return launches


def flattens(tensor: Tensor) -> bool:
    """Whether a single stride reaches all leading dimensions."""
    try:
        tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return False
    return True


def _is_storable(out: Tensor, m: int, n: int) -> bool:
    """Whether the kernels can write `out`: a row-major matrix, every row from a multiple of 16 bytes on and as long."""
    stride = _row_stride(out, m, n)
    rows_fit = n % _ROW_ALIGNMENT == 0 and stride is not None and stride % _ROW_ALIGNMENT == 0
    return rows_fit and out.data_ptr() % _TMA_BYTES == 0


def _tf32_microseconds(
    epilogue: Epilogue, x: Tensor, weight: Tensor, operands: Sequence[Tensor | None], out: Tensor, m: int
) -> float:
    """The predicted time of the fused TF32 kernel on these tensors; infinite where it does not run on them."""
    n, k = weight.shape
    x_stride, weight_stride, out_stride = (
        _row_stride(x, m, k),
        _row_stride(weight, n, k),
        _row_stride(out, m, n),
    )
    representable = x_stride is not None and weight_stride is not None and out_stride is not None
    if not representable or not all(operand is None or operand.is_contiguous() for operand in operands):
        return float("inf")
    addresses = x.data_ptr() | weight.data_ptr() | out.data_ptr() | _TMA_BYTES
    strides = (x_stride, weight_stride, out_stride)
    return plans.tf32_microseconds(epilogue.name, m, n, k, strides, addresses & -addresses, x.get_device())


def _row_stride(tensor: Tensor, rows: int, columns: int) -> int | None:
    """The step between the rows of a tensor as one row-major matrix; None where it is none."""
    if tensor.dim() != 2:
        try:
            tensor = tensor.view(rows, columns)
        except RuntimeError:
            return None
    row, column = tensor.stride()
    if columns > 1 and column != 1:
        return None
    return row if rows > 1 else -(-columns // _TMA_BYTES) * _TMA_BYTES
