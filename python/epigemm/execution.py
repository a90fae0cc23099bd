"""Runs a checked call: one fused kernel where there is one, else torch's GEMM and one elementwise kernel.

A fused kernel multiplies the tensors as they are, or fp32 ones on fp16 pieces (`epigemm.split`).

Nothing here looks at autograd or checks arguments: `functional` and `registration` come here when that is
done. Outputs are allocated by torch, so that running out of memory stays `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import packs, plans, split, torch_gemm
from epigemm import precision as _precision
from epigemm._native import cuda_status, entry, ops
from epigemm.epilogues import Epilogue, compute_dtype, fold_batch_norm_reference

_ONE_PASS = _precision.Roads((_precision.IEEE,), False)
_fused_linear_out = entry("_fused_linear_out")
_elementwise_out = entry("_elementwise_out")
_derivative_out = entry("_derivative_out")
_fold_batch_norm_out = entry("_fold_batch_norm_out")

on_first_call: Callable[..., None] | None = None
"""Sees every call before it is dispatched, while `epigemm.tuning` measures choices as they come up."""


def linear_forward(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None = None,
    *,
    pack_use: str = packs.FIND,
    strict: bool = False,
) -> Tensor:
    """D = epilogue(x @ weight.T) into `out`, or into a new contiguous tensor of shape `[..., N]`.

    Args:
        epilogue: what follows the product.
        x: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]` or None.
        operands: the epilogue's vectors, then its scalar if that is a tensor.
        scalars: its scalar if that is a number.
        precision: what an fp32 product gets, `DEFAULT` for torch's setting.
        out: where the result goes.
        pack_use: what the call may do with the weight's pack (see `epigemm.packs`).
        strict: raise instead of running torch's GEMM.

    Raises:
        RuntimeError: `strict`, and no fused kernel would run.
        torch.OutOfMemoryError: no memory for the result; or `strict`, and none for the fused kernel.
    """
    if plans.has_gpu_kernels(x):
        if out is None:
            out = torch_gemm.new_output(x, weight)
        if on_first_call is not None:
            on_first_call(epilogue, x, weight, bias, operands, scalars, precision, out, pack_use)
        if x.dtype is not torch.float32:
            if fused_once(epilogue, x, weight, bias, operands, scalars, _precision.IEEE, out):
                return out
        elif _fp32_fused(
            epilogue, x, weight, bias, operands, scalars, precision, out, pack_use, strict=strict
        ):
            return out
    return unfused(epilogue, x, weight, bias, operands, scalars, precision, out, pack_use, strict=strict)


def fused_once(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    arithmetic: str,
    out: Tensor,
) -> bool:
    """Run one fused kernel on the tensors as they are; False where there is none, or another road is faster.

    Checks that the arguments fit before anything is launched, with less to say about it than `checks.linear`.
    """
    ran: bool = _fused_linear_out(
        epilogue.name, x, weight, bias, operands or None, scalars or None, arithmetic, None, out
    )
    return ran


def _fp32_fused(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
    pack_use: str,
    *,
    strict: bool,
) -> bool:
    """Run an fp32 call on the first fused kernel that takes it; False where none does."""
    roads = linear_roads(x, precision)
    for arithmetic in roads.fused:
        if arithmetic == _precision.IEEE:
            continue  # no fused kernel computes these products: no need to ask
        call = (epilogue, x, weight, bias, operands, scalars, arithmetic, out)
        if arithmetic in packs.PIECES:
            if _on_pieces(*call, pack_use, tf32_allowed=roads.tf32_allowed, strict=strict):
                return True
        elif fused_once(*call):
            return True
    return False


def unfused(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    pack_use: str,
    *,
    strict: bool,
) -> Tensor:
    """What no fused kernel took: torch's own path; RuntimeError where `strict`."""
    if strict:
        require_fused(epilogue, x, weight, bias, operands, scalars, precision, out, pack_use)
    return second_path(epilogue, x, weight, bias, operands, scalars, precision, out)


def second_path(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
) -> Tensor:
    """The call by torch's GEMM, and one elementwise kernel where the GEMM does not do everything."""
    if torch_gemm.adds_bias(epilogue, x, weight, bias, precision):
        return torch_gemm.run(x, weight, bias, precision, out)
    if torch_gemm.adds_relu(epilogue, x, weight, bias, precision, out):
        return torch_gemm.run(x, weight, bias, precision, out, relu=True)
    out = torch_gemm.run(x, weight, None, precision, out)
    return elementwise_forward(epilogue, out, bias, operands, scalars, out)


def _on_pieces(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    arithmetic: str,
    out: Tensor,
    pack_use: str,
    *,
    tf32_allowed: bool,
    strict: bool,
) -> bool:
    """Run an fp32 call on fp16 pieces; False where it does not run there, or there is no memory for them."""
    choice = split.choose(
        epilogue,
        x,
        weight,
        (bias, *operands),
        arithmetic,
        out,
        pack_use,
        tf32_allowed=tf32_allowed,
        ignore_shortage=strict,
    )
    if choice.why_not:
        split.declined(choice, weight)
        return False
    call = (epilogue, x, weight, bias, operands, scalars, arithmetic, out)
    try:
        split.run(choice, *call)
    except torch.OutOfMemoryError as error:
        shortage = error
    else:
        split.ran(choice, x, weight, arithmetic)
        return True
    split.ran_out_of_memory(choice, x, weight, arithmetic)
    # Memory for one call may be there where memory to keep is not.
    may_do = choice.source == split.MAKE
    if may_do and _on_pieces(*call, packs.FIND, tf32_allowed=tf32_allowed, strict=strict):
        return True
    if strict:
        raise shortage
    return False


class Considered(NamedTuple):
    """One fused kernel that a call is tried on.

    Attributes:
        arithmetic: what it multiplies in.
        why_not: why it does not run; empty where it does.
        choice: for a product on fp16 pieces, how it would run.
        plan: for any other, dispatch's answer.
    """

    arithmetic: str
    why_not: str
    choice: split.Choice | None
    plan: dict[str, Any]


def considered(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
    pack_use: str,
    *,
    strict: bool = False,
) -> Iterator[Considered]:
    """What `linear_forward` tries, in the same order, and what comes of it; launches nothing."""
    plans.has_gpu_kernels(x)  # the first question brings in what was measured on the GPU
    roads = linear_roads(x, precision)
    for arithmetic in roads.fused:
        if arithmetic not in packs.PIECES:
            plan = fused_plan(epilogue, x, weight, bias, operands, scalars, arithmetic, out)
            yield Considered(arithmetic, "" if plan["fused"] else str(plan["why_not"]), None, plan)
        elif plans.has_gpu_kernels(x):
            choice = split.choose(
                epilogue,
                x,
                weight,
                (bias, *operands),
                arithmetic,
                out,
                pack_use,
                tf32_allowed=roads.tf32_allowed,
                ignore_shortage=strict,
            )
            yield Considered(arithmetic, choice.why_not, choice, {})


def require_fused(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    pack_use: str,
) -> None:
    """RuntimeError unless one fused kernel would run; says why none does."""
    reasons = [no_kernels(x)]
    if has_native_kernels(x):
        if out is None:
            out = torch_gemm.new_output(x, weight)
        call = (epilogue, x, weight, bias, operands, scalars, precision, out, pack_use)
        reasons = [found.why_not for found in considered(*call, strict=True)]
        if "" in reasons:
            return
    raise RuntimeError(
        "strict: got True for a call that no fused kernel would run "
        f"({'; '.join(dict.fromkeys(reasons))}); accepted there is False"
    )


def fused_plan(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    arithmetic: str,
    out: Tensor,
) -> dict[str, Any]:
    """What dispatch says about one kernel on the tensors as they are."""
    plan: dict[str, Any] = json.loads(
        ops._explain_linear(
            epilogue.name,
            x,
            weight,
            bias,
            operands,
            scalars,
            arithmetic,
            out,
        )
    )
    return plan


def elementwise_forward(
    epilogue: Epilogue,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    out: Tensor | None = None,
) -> Tensor:
    """D = epilogue(x) into `out` (which may be x itself), or into a new tensor laid out as `torch.empty_like(x)`."""
    if out is None:
        out = torch.empty_like(x)
    if has_native_kernels(x):
        _elementwise_out(epilogue.name, x, bias, operands or None, scalars or None, out)
    else:
        out.copy_(epilogue.reference(x, bias, operands, scalars))
    return out


def derivative(
    epilogue: Epilogue,
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> Tensor:
    """grad * d epilogue(x) / dx in one kernel; `x` on a device with native kernels."""
    contiguous = [_dense(operand) for operand in operands]
    bias = None if bias is None else _dense(bias)
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    _derivative_out(epilogue.name, grad, x, bias, contiguous or None, scalars or None, out)
    return out


def _dense(vector: Tensor) -> Tensor:
    """A vector (or a 0-d tensor) without gaps; a single element is contiguous to torch whatever its stride says."""
    vector = vector.contiguous()
    if vector.dim() == 0 or vector.stride(0) == 1:
        return vector
    return vector.as_strided(vector.shape, (1,))


def fold_batch_norm_forward(
    like: Tensor, columns: int, vectors: Sequence[Tensor | None], eps: float
) -> Tensor:
    """The BatchNorm fold, `[2, columns]`: multiplier and offset in the epilogue's arithmetic type."""
    if not has_native_kernels(like):
        return fold_batch_norm_reference(like, vectors, eps)
    folded = torch.empty((2, columns), dtype=compute_dtype(like.dtype), device=like.device)
    _fold_batch_norm_out(*vectors, eps, folded)
    return folded


def has_native_kernels(x: Tensor) -> bool:
    """Whether epigemm's elementwise kernels run on x's device; otherwise the PyTorch reference stands in."""
    return x.is_cpu or plans.has_gpu_kernels(x)


def no_kernels(x: Tensor) -> str:
    """Why none of epigemm's kernels runs on x's device; empty where they do."""
    if x.is_cuda:
        return cuda_status(x.get_device())
    return "" if x.is_cpu else f"x is on {x.device}; epigemm has kernels for CUDA and CPU"


def linear_roads(x: Tensor, precision: str) -> _precision.Roads:
    """What a call on x may run on; only fp32 has a choice."""
    return _precision.roads(precision, x.device.type) if x.dtype == torch.float32 else _ONE_PASS
