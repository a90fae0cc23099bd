"""The cold path: runs a call that the entry has not answered, by one fused kernel if there is one, else the fallback.

A fused kernel multiplies the tensors as they are, or fp32 ones on fp16 slices (`epigemm.calls.weight_slices`).

In the batch-invariant mode each result is the same sequence of operations, whatever its row: one tile of the Hopper
kernels, or fp32 multiply-adds. Where the kernel cannot read or write the tensors, copies of them are multiplied, padded
with zeros to what TMA asks for. On a CPU each row is a call of its own.

Nothing here looks at autograd. Outputs are allocated by torch, so that running out of memory stays
`torch.OutOfMemoryError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import elementwise_kernels, fallback, weight_slices
from epigemm.epilogues.kinds import KINDS
from epigemm.linking import loading
from epigemm.packs import weight_packs
from epigemm.planning import decisions, plans


def linear(call: LinearCall) -> Tensor:
    """Check a call and run it.

    Raises:
        RuntimeError: arguments that do not fit; or `strict`, and no fused kernel would run.
        torch.OutOfMemoryError: no memory for the result; or `strict`, and none for the fused kernel.
    """
    checks.linear(call)
    if call.out is None:
        return _linear(call)
    checks.output_overlap(call.out, call.x, call.others, in_place=False)
    result = _linear(call)
    mark_written(call.out)
    return result


def _linear(call: LinearCall) -> Tensor:
    if call.invariant and not call.is_empty:
        return _invariant(call)
    decision = None
    if plans.has_gpu_kernels(call.x):
        if call.out is None:
            call = call._replace(out=call.new_out())
        decision = _run_fused(call)
        if decisions.way(decision) != decisions.FALLBACK:
            return call.out  # type: ignore[return-value]
    if call.strict:
        require_fused(call)
    return fallback.linear(call, decision)


def elementwise(call: ElementwiseCall) -> Tensor:
    """Check a call and run it."""
    checks.elementwise(call)
    if call.out is not None:
        checks.output_overlap(call.out, call.x, call.others, in_place=True, first=checks.first_of(call))
        mark_written(call.out)
    return elementwise_kernels.elementwise(call)


def mark_written(out: Tensor) -> None:
    """Bump the version counter of a tensor that a kernel writes outside of torch's sight."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _run_fused(call: LinearCall) -> int:
    """Run a call by a fused kernel where one is chosen; returns the decision, by which nothing ran if the fallback is.

    What is decided on fp16 slices may find no memory: it is decided again then, without what there is no room for.
    """
    code, strict = decisions.fp32_code(call), call.strict or call.invariant
    if call.x.dtype is not torch.float32:
        return decisions.decide(call, code, 0, launch=True) if _link(call, code, 0) else decisions.FALLBACK
    uses = dict.fromkeys(weight_packs.SLICES, call.pack_use)
    given_up = 0
    # Of a strict call, which raises it unless the product runs on slices after all.
    shortage: torch.OutOfMemoryError | None = None
    while True:
        choices, costs = weight_slices.find_for(call, uses, ignore_shortage=strict)
        if not _link(call, code, costs | given_up):
            return decisions.FALLBACK
        decision = decisions.decide(call, code, costs | given_up, launch=shortage is None)
        _note_declined(code, decision, choices, call.weight)
        arithmetic = decisions.arithmetic(decision)
        if decisions.way(decision) != decisions.SLICES or (
            shortage and uses[arithmetic] != weight_packs.FIND
        ):
            if shortage is not None:
                raise shortage
            return decision
        choice = choices[arithmetic]._replace(padded=decisions.is_padded(decision))
        try:
            weight_slices.run(choice, call, arithmetic, decisions.plan(decision))
        except torch.OutOfMemoryError as error:
            weight_slices.ran_out_of_memory(choice, call, arithmetic)
            if strict and choice.source != weight_slices.MAKE:
                raise
            shortage = error if strict else None
        else:
            weight_slices.ran(choice, call, arithmetic)
            return decision
        if choice.source == weight_slices.MAKE:
            uses[arithmetic] = (
                weight_packs.FIND
            )  # memory for one call may be there where memory to keep is not
        else:
            given_up |= decisions.SHORT << decisions.SHIFTS[arithmetic]


def _link(call: LinearCall, code: int, slices: int) -> bool:
    """Link what the call is about to run; False where that cannot be."""
    reason = loading.link(call.epilogue, decisions.missing_kernels(call, code, slices), call.x.device)
    if reason and call.invariant:
        _refuse(call.x, reason)
    return not reason


def _note_declined(
    code: int, decision: int, choices: Mapping[str, weight_slices.Choice], weight: Tensor
) -> None:
    """Have the packs of arithmetics that were tried in vain know of it."""
    taken = decisions.arithmetic(decision) if decisions.way(decision) else None
    for arithmetic in _precision.road(code).fused:
        if arithmetic == taken:
            return
        if arithmetic in choices:
            weight_slices.declined(choices[arithmetic], weight)


class Considered(NamedTuple):
    """One arithmetic that a call is tried in."""

    arithmetic: str  # what its kernels multiply in
    why_not: str  # why none of them runs; empty where one does
    plan: dict[str, Any]  # dispatch's answer
    # for a product on fp16 slices, where they come from and where the result goes
    choice: weight_slices.Choice | None
    packed: bool  # there, whether the weight's were not charged to the call
    tf32_allowed: bool  # there, whether torch's GEMM, which the plan was compared with, may use TF32


def considered(call: LinearCall, *, strict: bool = False) -> list[Considered]:
    """What `linear` tries, in the same order, and what comes of it; launches nothing."""
    has_kernels = plans.has_gpu_kernels(call.x)  # the first question brings in what was measured on the GPU
    if call.out is None:
        call = call._replace(out=call.new_out())
    code = decisions.fp32_code(call)
    on_slices = weight_packs.SLICES if has_kernels and call.x.dtype == torch.float32 else {}
    uses = dict.fromkeys(on_slices, call.pack_use)
    choices, costs = weight_slices.find_for(call, uses, ignore_shortage=strict)
    found = [
        _considered(each, choices.get(each["arithmetic"]))
        for each in decisions.explain(call, code, costs)["tried"]
    ]
    if not has_kernels or not any(not each.why_not for each in found):
        return found
    reason = loading.would_link(call.epilogue, decisions.missing_kernels(call, code, costs), call.x.device)
    return [each if each.why_not else each._replace(why_not=reason) for each in found]


def considered_on_copies(call: LinearCall) -> list[Considered]:
    """The same for a batch-invariant call whose tensors are copied, which makes none of the copies.

    What is on fp16 slices needs none.
    """
    tried = decisions.explain(_on_meta(call), decisions.fp32_code(call), 0, call.x)["tried"]
    return [_considered(each, None) for each in tried]


def _considered(tried: dict[str, Any], choice: weight_slices.Choice | None) -> Considered:
    plan = tried["plan"]
    why_not = "" if tried["runs"] else str(tried["why_not"] or plan["why_not"])
    choice = None if choice is None else choice._replace(padded=tried["padded"])
    return Considered(tried["arithmetic"], why_not, plan, choice, tried["packed"], tried["tf32_allowed"])


def require_fused(call: LinearCall) -> None:
    """RuntimeError unless one fused kernel would run; says why none does."""
    reasons = [elementwise_kernels.why_none(call.x)]
    if elementwise_kernels.has_native(call.x):
        reasons = [found.why_not for found in considered(call, strict=True)]
        if "" in reasons:
            return
    raise RuntimeError(
        "strict: got True for a call that no fused kernel would run "
        f"({'; '.join(dict.fromkeys(reasons))}); accepted there is False"
    )


# --- the batch-invariant mode ----------------------------------------------------------------------------------------

_TMA_BYTES = 16


def _invariant(call: LinearCall) -> Tensor:
    """A batch-invariant call that is not empty: by one kernel, on copies of the tensors if need be, or row by row."""
    if runs_by_rows(call):
        refuse(call)
        return _row_by_row(call)
    if call.out is None:
        call = call._replace(out=call.new_out())
    out: Any = call.out
    if decisions.way(_run_fused(call)) == decisions.FALLBACK:
        refuse(call)
        copied = _on_copies(call, _with_zeros)
        if decisions.way(_run_fused(copied)) == decisions.FALLBACK:
            raise RuntimeError(
                "x: got tensors that no fused kernel covers, even copied and padded to 16 bytes"
            )
        out.copy_(copied.out[:, : call.weight.shape[0]].view(out.shape))  # type: ignore[index]
    return out  # type: ignore[no-any-return]


def refuse(call: LinearCall) -> None:
    """RuntimeError where no kernel would run that the call insists on."""
    if not call.invariant or call.is_empty or runs_by_rows(call):
        if call.strict:
            require_fused(call)
    elif reason := _why_none(call):
        _refuse(call.x, reason)


def runs_by_rows(call: LinearCall) -> bool:
    """Whether each row is a call of its own: on a CPU. Of a GPU the question makes it known to the planner."""
    return not plans.has_gpu_kernels(call.x) and call.x.is_cpu


def _why_none(call: LinearCall) -> str:
    """Why no kernel computes a call that is not empty in a fixed order, not even on copies; empty where one does."""
    x = call.x
    if runs_by_rows(call):
        return ""
    if reason := elementwise_kernels.why_none(x) or plans.no_gemm_kernels():
        return reason
    if x.dtype == torch.float64:
        return "fused kernels exist for float16, bfloat16 and float32, not for float64"
    found = considered_on_copies(call)
    if all(each.why_not for each in found):
        return str(found[0].plan["why_not_covered"])
    missing = decisions.missing_kernels(_on_meta(call), decisions.fp32_code(call), 0, x)
    return loading.would_link(call.epilogue, missing, x.device)


def _refuse(x: Tensor, reason: str) -> NoReturn:
    """Raise RuntimeError: PyTorch's GEMM is no answer here."""
    got = f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
    raise RuntimeError(
        f"x: got {got} in the batch-invariant mode, where no kernel computes "
        f"it in a fixed order ({reason}); accepted there are float16, bfloat16 and float32 on a Hopper GPU, and "
        "tensors on a CPU"
    )


def _on_meta(call: LinearCall) -> LinearCall:
    return _on_copies(call, lambda tensor, sizes: tensor.new_empty(sizes, device="meta"))


def _on_copies(call: LinearCall, copy: Callable[[Tensor, Sequence[int]], Tensor]) -> LinearCall:
    # Zeros add nothing to a sum, and copies change no bits: these results are those of tensors that TMA can read.
    m, (n, k) = call.rows, call.weight.shape
    is_by_tma = call.x.dtype != torch.float32 or decisions.order(call).fused[0] == _precision.TF32
    step = _TMA_BYTES // call.x.element_size() if is_by_tma else 1
    width, depth = n + -n % step, k + -k % step
    operands = zip(call.operands, call.kinds, strict=True)
    return call._replace(
        x=copy(call.x, (m, depth)),
        weight=copy(call.weight, (width, depth)),
        bias=None if call.bias is None else copy(call.bias, (width,)),
        operands=[copy(operand, KINDS[kind].shape((m,), width)) for operand, kind in operands],
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


def _row_by_row(call: LinearCall) -> Tensor:
    """Each row alone, always at the same addresses: math libraries choose their code by the alignment of operands."""
    x, (n, k) = call.x, call.weight.shape
    out = call.new_out() if call.out is None else call.out
    rows = x.reshape(-1, k)
    target = out.view(-1, n) if weight_slices.flattens(out) else out.new_empty((len(rows), n))
    row, result = x.new_empty((1, k)), x.new_empty((1, n))
    of_row = call._replace(x=row, out=result)
    for index in range(len(rows)):
        row.copy_(rows[index : index + 1])
        operands = [
            operand[index : index + 1] if KINDS[kind].by_row else operand
            for operand, kind in zip(call.operands, call.kinds, strict=True)
        ]
        fallback.linear(of_row._replace(operands=operands))
        target[index : index + 1].copy_(result)
    if not weight_slices.flattens(out):
        out.copy_(target.view(out.shape))
    return out
