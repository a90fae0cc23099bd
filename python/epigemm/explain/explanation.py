"""What a call and its first derivative run, and why, in words: the dry run of it (`epigemm.planner.dry_runs`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import EIGHT_BITS, ElementwiseCall, FoldCall, LinearCall, tensors_of
from epigemm.autograd import gradients
from epigemm.calls import eight_bits, elementwise_kernels, groups, invariant, weight_slices
from epigemm.calls.forecast import Considered, consider, require_fused
from epigemm.calls.layouts import flattens
from epigemm.calls.weight_slices import Choice
from epigemm.epilogues.library import SCALE_BATCH_NORM
from epigemm.epilogues.registry import compute_dtype
from epigemm.explain.answer import ELEMENTWISE, FUSED, GEMM_ELEMENTWISE, REFERENCE, Explanation
from epigemm.planner import dry_runs, plans, times
from epigemm.planner.dry_runs import DryRun, Tried

PROMOTED = (
    "autocast: an operand is float32, and so is the result, as in PyTorch; the product is rounded to autocast's dtype, "
    "and what follows is computed and stored in float32"
)
_ADDMM = "(addmm, with the bias)"
_GEMMS = {
    dry_runs.PRODUCT: "(mm)",
    dry_runs.WITH_BIAS: _ADDMM,
    dry_runs.WITH_BIAS_AND_RELU: "(_addmm_activation, with the bias and the ReLU)",
}
_SAVED = (
    "gradients are recorded: the product is saved for the derivative, the epilogue is a kernel of its own"
)
_STRICT = " (strict=True: one kernel, and the derivative makes the product again)"
KEPT = "gradients are recorded: the kernel also stores the product, for the derivative"
_LEFT_TO_TORCH = "PyTorch's own operators record the call"
_NONE_FOR_FUSED = (
    ": none of the layer's products is one for a fused kernel, and the host takes longer than the device"
)
_INVARIANT = (
    "batch invariant: N, K, dtype and precision choose the kernel, not M; nothing splits a sum over K"
)
_BY_ROWS = "on a CPU each row is a call of its own"
_WAS_SHORT = "the last call of these sizes found no memory for fp16 slices and ran without them"
_BOTH = "one kernel multiplies x by both weights; the second product is never stored"
_AS_IT_LIES = "the weight is read as it lies, in fp32: no slices of it are made"
_STALE = "; its kept pack is stale until repack(), as the weight has changed"
_CHANGING = "the weight is split at every call: a gradient of it is asked for, so it is about to change"
_GUARD = (
    "the range check finds tiles whose rows have too wide a range for fp16 slices, or infinities or NaN; "
    "the last launch recomputes them"
)
LAUNCHES = {
    "copy": "epigemm CUDA kernel, copy: ",
    "copy_of_operands": "torch copy of operands: they have gaps between their elements",
    "copy_of_x": "torch copy of x: its leading dimensions are not one stride apart",
    "split_of_weight": "epigemm CUDA kernel, split of weight into fp16 slices",
    "scales_of_weight": "epigemm CUDA kernel, the scales of the weight's rows, remembered if they can be",
    "split_of_x": "epigemm CUDA kernel, split of x into fp16 slices",
    "fixup": "epigemm CUDA kernel, fixup of what the range check rejected (exits at once where that is nothing)",
    "copy_of_result": "torch copy of the result: out is no matrix with rows of whole 16 bytes",
    "blocks": "epigemm CUDA kernel, mean and variance of blocks of rows",
    "merge": "epigemm CUDA kernel, mean and variance of the columns, from those of the blocks",
}
_COPIED = "tensors that the kernel cannot read or write are copied first, padded to whole 16 bytes for TMA"
_SLICES_TEXT = {
    _precision.SPLIT: "split: three products of two fp16 slices, float32 accumulation; fp32's accuracy",
    _precision.SCALED: "scaled: products of fp16 numbers, each row scaled to fp16's range, float32 accumulation; "
    "tf32's mantissas",
}


BACKWARD_BY_TORCH = "by PyTorch's own operators"
_SUMS = {
    _precision.PROMOTED: "float32 accumulation of sums of 128 of them",
    _precision.FAST: "accumulated by the tensor cores alone",
}


def of_linear(call: LinearCall) -> Explanation:
    """A call that saves nothing for a derivative but its inputs and its result."""
    if call.fold is not None:
        return _with_fold(of_linear(call.described()), call, call.fold)
    checks.arguments(call)
    if call.out is not None:
        checks.output_overlap(call.out, call.x, call.others, in_place=False)
    return explain_linear(call)


def recorded_by_torch(call: LinearCall) -> Explanation:
    """A call that PyTorch's own operators record."""
    gemm = f"torch GEMM {'(mm)' if call.bias is None else _ADDMM}"
    operator = call.epilogue.name.removeprefix("bias_")
    launches = [gemm, *([] if call.epilogue.is_bias else [f"torch {operator}"])]
    fused = [_LEFT_TO_TORCH + _NONE_FOR_FUSED]
    reasons = fused if _can_be_fused(call) else [*explain_linear(call).reasons, _LEFT_TO_TORCH]
    return replace(_by_torch(call, launches, reasons), backward=BACKWARD_BY_TORCH)


def of_fold(call: FoldCall) -> str:
    """The launch that folds vectors."""
    text = f"fold of {call.columns} columns into multiplier and offset (fold_batch_norm)"
    return elementwise_kernel(call.like, text)


def _with_fold(found: Explanation, call: LinearCall, fold: FoldCall) -> Explanation:
    """The launches with that of a fold, of which a dry run does not know."""
    kernel, (first, *kernels), text = found.kernel, found.kernels, of_fold(fold)
    # If the product is rounded to 16 bits, PyTorch's GEMM adds the bias of a fold before that. Not row by row.
    has_bias = fold.vectors[0] is not None and not call.invariant
    if has_bias and (call.x.element_size() == 2 or found.path == REFERENCE):
        kernel, first = kernel.replace("(mm)", _ADDMM), first.replace("(mm)", _ADDMM)
    is_behind = found.path == GEMM_ELEMENTWISE and elementwise_kernels.has_native(call.x)
    both = [first, text] if is_behind else [text, first]
    return replace(found, kernel=kernel, kernels=[*both, *kernels])


def of_one_kernel(call: LinearCall) -> Explanation | None:
    """A call of which one kernel gives more than a result; None where the caller makes several calls."""
    considered = consider(call)
    if considered.taken is None or not considered.found.copies_nothing:
        return None
    found = explain_linear(call, considered)
    return found if call.weight2 is None else replace(found, reasons=[_BOTH, *found.reasons])


def apart(found: Explanation, call: LinearCall, before: list[str], is_recorded: bool) -> Explanation:
    """A call as two kernels: the product, of which there is an explanation, and the epilogue behind it."""
    path = REFERENCE if elementwise_kernels.why_none(call.x) else GEMM_ELEMENTWISE
    launches, reasons = [*found.kernels, *before, in_its_own_kernel(call)], found.reasons
    if is_recorded:
        reasons = [_SAVED + _STRICT, *reasons] if _can_be_fused(call) else [*reasons, _SAVED]
    return replace(found, path=path, reasons=reasons, kernels=launches, backward="")


def _can_be_fused(call: LinearCall) -> bool:
    """Whether a GEMM kernel of epigemm's runs where the call is."""
    return plans.has_gpu_kernels(call.x) and not plans.no_gemm_kernels()


def _by_torch(
    call: LinearCall, launches: list[str], reasons: list[str], path: str = GEMM_ELEMENTWISE, **more: Any
) -> Explanation:
    """A call whose product is torch's GEMM, the first launch unless `kernel` says otherwise."""
    # The arithmetic of torch's fp32 GEMM is that of its setting, unless the call asks for more accuracy.
    allowed = call.order.tf32_allowed
    arithmetic = _precision.torch_setting(call.x.device.type) if allowed else _precision.IEEE
    if call.eight_bits is not None:
        arithmetic = call.eight_bits.accumulate if eight_bits.runs_scaled_mm(call) else _precision.IEEE
    about = {"kernel": launches[0], "arithmetic": arithmetic_text(call.x.dtype, arithmetic), **more}
    return Explanation("", path, reasons=reasons, kernels=launches, **about)


def explain_linear(call: LinearCall, considered: Considered | None = None) -> Explanation:
    """A call that records nothing: the first arithmetic that a fused kernel runs in, or the fallback.

    `considered`: what is known of a call that a fused kernel runs.
    """
    if considered is None:
        if call.invariant and not call.is_empty:
            return _explain_invariant(call)
        if call.strict:
            require_fused(call)
        if unavailable := elementwise_kernels.why_none(call.x):
            return _of_fallback(call, None, [f"no fused kernel: {unavailable}"], [])
        considered = consider(call)
    reasons: list[str] = []
    candidates: list[dict[str, Any]] = []
    for tried in considered.found.tried:
        choice = considered.choices.get(tried.arithmetic)
        if not (why_not := considered.why_not(tried)):
            reasons += _why(call, tried, choice)
            return _explain_fused(call, considered.found, tried, reasons)
        source = tried.plan.get("source", "model")
        if source != "model" and "measured" in why_not:
            why_not += f": {times.source_text(source, tried.plan)}"
        if choice is None:
            candidates = tried.plan.get("candidates", [])
            reasons.append(f"no fused kernel: {why_not}")
        else:
            slices = "two fp16 slices instead" if reasons else "fp16 slices"
            reasons += [f"not on {slices}: {why_not}", *_memory_notes(call, tried.arithmetic)]
    return _of_fallback(call, considered.found, reasons, candidates)


def _of_fallback(
    call: LinearCall, found: DryRun | None, reasons: list[str], candidates: list[dict[str, Any]]
) -> Explanation:
    """PyTorch's GEMM and the kernels behind it; `found` is None if epigemm has no kernels."""
    if call.eight_bits is not None:
        return _by_torch(call, eight_bits.launches(call), reasons, REFERENCE, candidates=candidates)
    if call.weight.dim() == 3:
        return _by_torch(call, groups.launches(call), reasons, REFERENCE, candidates=candidates)
    kernel = f"torch GEMM {_GEMMS[dry_runs.PRODUCT if call.bias is None else dry_runs.WITH_BIAS]}"
    behind = f"{in_its_own_kernel(call)}, in place on the product"
    launches = [kernel] if call.epilogue.is_bias else [kernel, behind]
    if found is not None and not found.answer:  # not by PyTorch's operators
        kernel = f"torch GEMM {_GEMMS[found.gemm]}"
        launches = _launches(found.launches, torch_gemm=kernel, elementwise=behind)
    plan = found.tried[-1].plan if found is not None and found.tried and plans.has_gpu_kernels(call.x) else {}
    about: dict[str, Any] = {"candidates": candidates, "kernel": kernel}
    if "fallback_us" in plan:
        about |= {"us": plans.fallback_us(plan), "is_measured": "fallback_measured_us" in plan}
    path = REFERENCE if found is None else GEMM_ELEMENTWISE
    return _by_torch(call, launches, [*reasons, *_fallback_notes(call)], path, **about)


def _why(call: LinearCall, tried: Tried, choice: Choice | None) -> list[str]:
    """Why this kernel: its time, that of its alternative, their source, and the source of the weight's slices."""
    plan = tried.plan
    source = plan.get("source", "model")
    how = "by prediction" if source == "model" else "as measured"
    fastest = f"fastest {how} of {len(plan['candidates'])} fused kernels: {plans.fused_us(plan):.1f} us"
    if "fallback_us" in plan and call.group_ends is None:  # else it is that of one product
        other = "the fallback" if call.weight2 is None else "two calls"
        if choice is not None:
            other = "torch's TF32 GEMM" if tried.tf32_allowed else "torch's fp32 GEMM"
        fastest += f", against {plans.fallback_us(plan):.1f} us for {other}"
    fastest = f"{fastest}: {times.source_text(source, plan)}"
    if choice is None:
        return [fastest]
    slices = weight_slices.describe_source(choice) if call.uses_pack else _CHANGING
    if tried.reads_weight:
        slices = _AS_IT_LIES + _STALE * (choice.pack is not None and call.uses_pack)
    return [fastest, slices, _GUARD, *_memory_notes(call, tried.arithmetic)]


def _explain_fused(call: LinearCall, dry: DryRun, tried: Tried, reasons: list[str]) -> Explanation:
    """A call on a fused kernel, which multiplies the tensors themselves, or fp16 slices."""
    tile, where, candidates = plans.tile_text(tried.plan), "", tried.plan["candidates"]
    arithmetic = arithmetic_text(call.x.dtype, tried.arithmetic)
    if tried.is_on_slices:
        where, arithmetic = " on fp16 slices", _SLICES_TEXT[tried.arithmetic]
    elif call.invariant and call.x.dtype == torch.float32 and tried.arithmetic == _precision.IEEE:
        where, tile = " in fp32 multiply-adds", f"tile {tried.plan['tile'].rpartition('x')[0]}"
        candidates = []
    kernel = f"epigemm fused GEMM{where}, {tile}, epilogue {call.epilogue.name}"
    launches = _launches(dry.launches, tried.copies, fused=kernel)
    found = Explanation("", FUSED, kernel, arithmetic, reasons, candidates, kernels=launches)
    us = plans.fused_us(tried.plan)
    return found if math.isinf(us) else replace(found, us=us, is_measured="measured_us" in tried.plan)


def _launches(names: Sequence[str], copied: Sequence[str] = (), **texts: str) -> list[str]:
    """The launches of a dry run, in words; `copied`: the copies of x and the weight."""
    copies = iter([*[", ".join(copied)] * bool(copied), "the result, from padded rows"])
    texts |= LAUNCHES
    return [f"{texts[name]}{next(copies) if name == 'copy' else ''}" for name in names]


def _explain_invariant(call: LinearCall) -> Explanation:
    """A call in the batch-invariant mode."""
    if invariant.runs_by_rows(call):
        if call.strict:
            require_fused(call)
        kernel = f"torch GEMM ({'addmm' if call.epilogue.is_bias else 'mm'}) of one row"
        after = [] if call.epilogue.is_bias else [f"{in_its_own_kernel(call)}, in place on the product"]
        launches = [f"for each row: {launch}" for launch in (kernel, *after)]
        return _by_torch(call, launches, [_INVARIANT, _BY_ROWS], kernel=kernel)
    invariant.refuse(call)
    considered = consider(call)
    reasons, choices, found = [_INVARIANT], considered.choices, considered.found
    are_copied = considered.taken is None
    if are_copied:
        choices, found = {}, invariant.consider_copies(call)
    tried = next(each for each in found.tried if not each.why_not)
    reasons += [each.why_not for each in found.tried[: found.tried.index(tried)]]
    if choice := choices.get(tried.arithmetic):
        reasons.append(weight_slices.describe_source(choice))
    return _explain_fused(call, found, tried, [*reasons, _COPIED] if are_copied else reasons)


def _memory_notes(call: LinearCall, arithmetic: str) -> list[str]:
    return [_WAS_SHORT] if weight_slices.lacked_memory(call, arithmetic) else []


def of_elementwise(call: ElementwiseCall) -> Explanation:
    """A call of an elementwise function."""
    x = call.x
    checks.arguments(call)
    if call.out is not None:
        checks.output_overlap(call.out, x, call.others, in_place=True, first=call.epilogue.first)
    kernel = in_its_own_kernel(call)
    reason = f"elementwise functions are one kernel; x is {dtype_name(x.dtype)} on {x.device}"
    path = ELEMENTWISE
    if why := elementwise_kernels.why_none(x):
        path, reason = REFERENCE, why
    elif not x.is_cuda:
        reason = f"on a CPU, PyTorch's operators compute this function; x is {dtype_name(x.dtype)}"
    return Explanation("", path, kernel, dtype_name(compute_dtype(x.dtype)), [reason], kernels=[kernel])


def _fallback_notes(call: LinearCall) -> list[str]:
    x, out, device_type = call.x, call.out, call.x.device.type
    notes = []
    apart = "its leading dimensions are not one stride apart"
    if x.dtype == torch.float32 and _precision.order(call.precision, device_type).overrides:
        setting = _precision.torch_setting(device_type)
        notes.append(
            f"precision={call.precision!r}: torch's setting {setting!r} is switched to 'ieee' for this GEMM"
        )
    if x.dim() != 2 and not flattens(x):
        notes.append(f"x: {apart}, torch copies it first")
    if out is not None and out.dim() != 2 and not flattens(out):
        notes.append(f"out: {apart}, the product is written elsewhere and copied")
    return notes


# --- the first derivative, as `autograd.gradients` makes it -----------------------------------------------------------


PRODUCTS = (
    "then one matrix product each for the gradients of x and weight, where asked for, at the call's precision"
)
_KERNEL = "one derivative kernel (made of the epilogue's functor)"
_REFERENCE = "the epilogue's differentiable PyTorch reference"


def backward_linear(call: LinearCall) -> str:
    """The launches of a linear function's first derivative, for the operands that require a gradient."""
    summed = "; it also sums the bias's gradient" if _sums_bias(call) else ""
    return f"{_backward_epilogue(call, summed)}{summed}; {PRODUCTS}"


def _sums_bias(call: LinearCall) -> bool:
    """Whether the derivative's kernel also gives the gradient of a bias that was added to the product."""
    epilogue, bias = call.epilogue, call.bias
    others = tensors_of(epilogue.without_bias(call.operands))
    # The package's own kernels sum the columns beside no other gradient.
    is_alone = not epilogue.is_compiled or not any(each.requires_grad for each in others)
    if bias is None or not bias.requires_grad or not is_alone:
        return False
    is_saved = epilogue.is_bias_relu or gradients.keeps_product(call)
    return is_saved and elementwise_kernels.sums_columns(call.x, call.weight.shape[0])


def _backward_epilogue(call: LinearCall, summed: str) -> str:
    x, epilogue = call.x, call.epilogue
    if epilogue.is_bias:
        return "nothing for the epilogue: the gradient of the result is that of the product"
    if epilogue.is_bias_relu and summed:
        return f"{_KERNEL} on the saved result, whose sign is the derivative of relu"
    if epilogue.is_bias_relu:
        return "torch's threshold_backward on the saved result, whose sign is the derivative of relu"
    if gradients.keeps_product(call):
        return f"{derivative(call)} on the saved product"
    if gradients.without_product(call):
        return f"{derivative(call)}; it reads no product, the epilogue being linear in it"
    gemm = "in 16 bits with an fp32 result" if x.element_size() == 2 else "at the call's precision"
    why = "one saved in 16 bits would be rounded ahead of the bias that is folded into the epilogue"
    if call.strict:
        why = "a strict call stays one kernel and saves none"
    # The package's own kernels do not read an fp32 product beside operands in 16 bits.
    is_mixed = x.element_size() == 2 and epilogue.is_compiled
    return f"the product again ({gemm}), as {why}; {_REFERENCE if is_mixed else derivative(call)} on it"


def derivative(call: LinearCall | ElementwiseCall) -> str:
    """What the derivative of the epilogue alone runs."""
    if not elementwise_kernels.has_native(call.x):
        return _REFERENCE
    if call.epilogue is SCALE_BATCH_NORM and any(each.requires_grad for each in tensors_of(call.operands)):
        return f"{_REFERENCE} (a gradient of an operand is asked for)"
    return _KERNEL


# --- words ------------------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def elementwise_kernel(x: Tensor, name: str) -> str:
    """An elementwise kernel of this name, on x's device."""
    return f"{'epigemm CUDA kernel' if elementwise_kernels.has_native(x) else 'PyTorch reference'}, {name}"


def arithmetic_text(dtype: torch.dtype, arithmetic: str) -> str:
    """The arithmetic of products and sums for a dtype."""
    if dtype == torch.float64:
        return "float64"
    if arithmetic == _precision.IEEE and (dtype == torch.float32 or dtype in EIGHT_BITS):
        return "ieee float32"
    if arithmetic in _SUMS:
        return f"{dtype_name(dtype)} products, {_SUMS[arithmetic]}"
    return f"{arithmetic if dtype == torch.float32 else dtype_name(dtype)} products, float32 accumulation"


def in_its_own_kernel(call: LinearCall | ElementwiseCall) -> str:
    """The launch of a call's epilogue behind a product."""
    return elementwise_kernel(call.x, call.epilogue.name)
