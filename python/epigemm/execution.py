"""Runs a checked call: one fused kernel where there is one, else torch's GEMM and one elementwise kernel.

A fused kernel multiplies the tensors as they are, or fp32 ones on fp16 pieces (`epigemm.split`).

Nothing here looks at autograd or checks arguments: `functional` and `registration` come here when that is
done. Outputs are allocated by torch, so that running out of memory stays `torch.OutOfMemoryError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import decisions, packs, plans, split, torch_gemm
from epigemm import precision as _precision
from epigemm._native import cuda_status, entry
from epigemm.epilogues import BIAS, Epilogue, compute_dtype, fold_batch_norm_reference

_ONE_PASS = _precision.Roads((_precision.IEEE,), False)
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
    call = (epilogue, x, weight, bias, operands, scalars)
    decision = None
    if plans.has_gpu_kernels(x):
        if out is None:
            out = torch_gemm.new_output(x, weight)
        if on_first_call is not None:
            on_first_call(*call, precision, out, pack_use)
        decision = _run_fused(call, precision, out, pack_use, strict=strict)
        if decisions.way(decision) != decisions.FALLBACK:
            return out
    if strict:
        require_fused(*call, precision, out, pack_use)
    return second_path(*call, precision, out, decision)


def _run_fused(call: decisions.Operands, precision: str, out: Tensor, pack_use: str, *, strict: bool) -> int:
    """Run a call by a fused kernel where one is chosen; returns the decision, by which nothing ran if the fallback is.

    What is decided on fp16 pieces may find no memory: it is decided again then, without what there is no room for.
    """
    _, x, weight = call[:3]
    code = decisions.fp32_code(x, precision)
    if x.dtype is not torch.float32:
        return decisions.decide(call, code, 0, out, launch=True)
    uses = {name: pack_use for name in _precision.road(code).fused if name in packs.PIECES}
    given_up = 0
    # Of a strict call, which raises it unless the product runs on pieces after all.
    shortage: torch.OutOfMemoryError | None = None
    while True:
        choices, costs = split.find_for(x, weight, uses, ignore_shortage=strict)
        decision = decisions.decide(call, code, costs | given_up, out, launch=shortage is None)
        _note_declined(code, decision, choices, weight)
        arithmetic = decisions.arithmetic(decision)
        if decisions.way(decision) != decisions.SLICES or (shortage and uses[arithmetic] != packs.FIND):
            if shortage is not None:
                raise shortage
            return decision
        choice = choices[arithmetic]._replace(padded=decisions.is_padded(decision))
        try:
            split.run(choice, *call, arithmetic, out, decisions.plan(decision))
        except torch.OutOfMemoryError as error:
            split.ran_out_of_memory(choice, x, weight, arithmetic)
            if strict and choice.source != split.MAKE:
                raise
            shortage = error if strict else None
        else:
            split.ran(choice, x, weight, arithmetic)
            return decision
        if choice.source == split.MAKE:
            uses[arithmetic] = packs.FIND  # memory for one call may be there where memory to keep is not
        else:
            given_up |= decisions.SHORT << decisions.SHIFTS[arithmetic]


def _note_declined(code: int, decision: int, choices: Mapping[str, split.Choice], weight: Tensor) -> None:
    """Have the packs of arithmetics that were tried in vain know of it."""
    taken = decisions.arithmetic(decision) if decisions.way(decision) else None
    for arithmetic in _precision.road(code).fused:
        if arithmetic == taken:
            return
        if arithmetic in choices:
            split.declined(choices[arithmetic], weight)


def second_path(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    decision: int | None = None,
) -> Tensor:
    """The call by torch's GEMM, and one elementwise kernel where the GEMM does not do everything.

    `decision`: what was decided of the call, where that was asked.
    """
    gemm = gemm_of(epilogue, x, weight, bias, operands, scalars, precision, out, decision)
    if epilogue is BIAS and (bias is None or gemm == decisions.WITH_BIAS):
        return torch_gemm.run(x, weight, bias, precision, out)
    if gemm == decisions.WITH_BIAS_AND_RELU:
        return torch_gemm.run(x, weight, bias, precision, out, relu=True)
    out = torch_gemm.run(x, weight, None, precision, out)
    return elementwise_forward(epilogue, out, bias, operands, scalars, out)


def gemm_of(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    decision: int | None = None,
) -> int:
    """What torch's GEMM does in the fallback: a constant of `decisions`."""
    if decision is None:
        call = (epilogue, x, weight, bias, operands, scalars)
        decision = decisions.decide(call, decisions.fp32_code(x, precision), 0, out)
    return decisions.gemm(decision)


class Considered(NamedTuple):
    """One arithmetic that a call is tried in.

    Attributes:
        arithmetic: what its kernels multiply in.
        why_not: why none of them runs; empty where one does.
        plan: dispatch's answer.
        choice: for a product on fp16 pieces, where they come from and where the result goes.
        packed: there, whether the weight's were not charged to the call.
        tf32_allowed: there, whether torch's GEMM, which the plan was compared with, may use TF32.
    """

    arithmetic: str
    why_not: str
    plan: dict[str, Any]
    choice: split.Choice | None
    packed: bool
    tf32_allowed: bool


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
) -> list[Considered]:
    """What `linear_forward` tries, in the same order, and what comes of it; launches nothing."""
    has_kernels = plans.has_gpu_kernels(x)  # the first question brings in what was measured on the GPU
    code = decisions.fp32_code(x, precision)
    uses = {
        name: pack_use
        for name in _precision.road(code).fused
        if has_kernels and x.dtype == torch.float32 and name in packs.PIECES
    }
    choices, costs = split.find_for(x, weight, uses, ignore_shortage=strict)
    call = (epilogue, x, weight, bias, operands, scalars)
    return [
        _considered(each, choices.get(each["arithmetic"]))
        for each in decisions.explain(call, code, costs, out)["tried"]
    ]


def _considered(tried: dict[str, Any], choice: split.Choice | None) -> Considered:
    plan = tried["plan"]
    why_not = "" if tried["runs"] else str(tried["why_not"] or plan["why_not"])
    choice = None if choice is None else choice._replace(padded=tried["padded"])
    return Considered(tried["arithmetic"], why_not, plan, choice, tried["packed"], tried["tf32_allowed"])


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
