"""`explain`: which kernels a call would launch, why these, and what was ruled out; it launches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epigemm import (
    checks,
    decisions,
    entry,
    execution,
    fallback,
    gradients,
    kernels,
    packs,
    plans,
    split,
    tables,
)
from epigemm import explain_text as text
from epigemm import precision as _precision
from epigemm.calls import ElementwiseCall, LinearCall
from epigemm.epilogues import BIAS, BIAS_RELU, compute_dtype
from epigemm.recording import Recorder, dtype_name, record

FUSED = "fused"
GEMM_ELEMENTWISE = "gemm+elementwise"
ELEMENTWISE = "elementwise"
REFERENCE = "reference"


@dataclass(frozen=True)
class Explanation:
    """What one call would do.

    Attributes:
        op: the public function and the epilogue behind it.
        path: "fused" (one GEMM kernel with the epilogue in it; fp32 on fp16 slices needs helpers before and after
            it, see `kernels`), "gemm+elementwise" (a GEMM, torch's unless gradients are recorded, then one elementwise
            kernel where the GEMM does not do everything), "elementwise" (one kernel), or "reference" (plain PyTorch
            operations, where epigemm has no kernels).
        kernel: the kernel that does most of the work.
        arithmetic: what the numbers are multiplied and accumulated in.
        reasons: why this path; for a path that is not fused, what ruled the fused kernel out.
        candidates: the fused kernels that were compared, best first, with their predicted microseconds
            (`predicted_us`) and, where that is known, what was measured (`measured_us`).
        backward: what the first derivative will run.
        kernels: every launch, in order.
    """

    op: str
    path: str
    kernel: str
    arithmetic: str
    reasons: list[str]
    candidates: list[dict[str, Any]] = field(default_factory=list)
    backward: str = ""
    kernels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The explanation for people: one line a fact."""
        lines = [f"{self.op}", f"  path:       {self.path}", f"  kernel:     {self.kernel}"]
        lines += [f"  arithmetic: {self.arithmetic}"]
        lines += text.listed("because", self.reasons)
        lines += text.listed("launches", [f"{i}. {kernel}" for i, kernel in enumerate(self.kernels, 1)])
        lines += text.listed("compared", [text.candidate_text(candidate) for candidate in self.candidates])
        lines += [f"  backward:   {self.backward}"]
        return "\n".join(lines)


def explain(fn_or_name: Callable[..., Tensor] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Tell which kernels `fn(*args, **kwargs)` would launch and why.

    Args:
        fn_or_name: a public function of epigemm, or its name; what `epigemm.epilogue` made, or its `elementwise`.
        args: the function's arguments.
        kwargs: its keyword arguments, `out=` and `precision=` included.

    Returns:
        An `Explanation`; print it to read it. For a result of its own the call is explained with a fresh
        `out`, which is allocated.

    Raises:
        ValueError: `fn_or_name` is no public function of epigemm.
        Exception: whatever the call itself raises for these arguments.

    Example:
        >>> print(epigemm.explain("linear_relu", torch.randn(8, 64), torch.randn(32, 64)))  # doctest: +SKIP
    """
    name, recorder = record(fn_or_name, *args, **kwargs)
    everything = [*args, *kwargs.values()]
    wants_gradients = torch.is_grad_enabled()
    differentiates = wants_gradients and any(
        isinstance(value, Tensor) and value.requires_grad for value in map(_unpacked, everything)
    )
    return _explanation(name, recorder, differentiates, wants_gradients)


def _unpacked(value: Any) -> Any:
    return value.weight if isinstance(value, packs.PackedWeight) else value


def _explanation(
    function: str, recorder: Recorder, differentiates: bool, wants_gradients: bool
) -> Explanation:
    operator, call = recorder.taken_apart()
    op = f"{function}: epigemm::{operator}, epilogue {call.epilogue.name}: {call.epilogue.formula}"
    if isinstance(call, LinearCall):
        backward = text.backward_linear(call)
        found = _explain_recorded(call, differentiates, wants_gradients)
    else:
        found, backward = _explain_elementwise(call), text.backward_elementwise(call)
    if call.out is not None:
        backward = "none: a call with out= has no derivative"
    elif not differentiates:
        backward = f"not needed: no argument requires grad (otherwise: {backward})"
    folds = [f"{text.owner(call.x)} {fold}" for fold in recorder.folds]
    launches = [*recorder.casts, *folds, *found.pop("kernels")]
    return Explanation(op=op, backward=backward, kernels=launches, **found)


_SAVED = (
    "gradients are recorded: the product is saved for the derivative, the epilogue is a kernel of its own "
    "(strict=True: one kernel, and the derivative makes the product again)"
)


_LEFT_TO_TORCH = (
    "PyTorch's own operators record the call: none of the layer's three products is one for a fused kernel, and the "
    "host takes longer than the device"
)


def _explain_recorded(call: LinearCall, differentiates: bool, wants_gradients: bool) -> dict[str, Any]:
    """The forward pass, which may depend on the backward one."""
    checks.linear(call)
    if call.out is not None:
        checks.output_overlap(call.out, call.x, call.others, in_place=False)
    is_recorded = (
        call.out is None and differentiates and any(t is not None and t.requires_grad for t in call.inputs)
    )
    if is_recorded and call.epilogue in (BIAS, BIAS_RELU) and entry.is_left_to_torch(call):
        return _explain_left_to_torch(call)
    if call.out is not None or not differentiates or not gradients.keeps_product(call):
        return _explain_linear(call, wants_gradients)
    call = call.with_bias_in_product()
    found = _explain_linear(call.product(), wants_gradients)
    found["path"] = GEMM_ELEMENTWISE if kernels.has_native(call.x) else REFERENCE
    found["reasons"] = [_SAVED, *found["reasons"]]
    found["kernels"] = [*found["kernels"], _in_its_own_kernel(call)]
    return found


def _explain_left_to_torch(call: LinearCall) -> dict[str, Any]:
    gemm = f"torch GEMM ({'mm' if call.bias is None else 'addmm, with the bias'})"
    return {
        "arithmetic": text.arithmetic_text(call.x.dtype, _torch_arithmetic(call)),
        "path": GEMM_ELEMENTWISE,
        "kernel": gemm,
        "reasons": [_LEFT_TO_TORCH],
        "kernels": [gemm, *([] if call.epilogue is BIAS else ["torch relu"])],
    }


def _in_its_own_kernel(call: LinearCall | ElementwiseCall) -> str:
    if call.epilogue.is_linked and not call.x.is_cuda:
        return f"PyTorch reference, {call.epilogue.name}"
    return f"{text.owner(call.x)} {call.epilogue.name}"


def _explain_linear(call: LinearCall, wants_gradients: bool) -> dict[str, Any]:
    changing = wants_gradients and call.weight.requires_grad
    if changing:
        call = call._replace(pack_use=packs.NONE)
    execution.refuse(call)
    if call.invariant and not call.is_empty:
        return _explain_invariant(call)
    x, candidates = call.x, []
    reasons: list[str] = []
    if unavailable := kernels.why_none(x):
        reasons.append(f"no fused kernel: {unavailable}")
    else:
        for found in execution.considered(call):
            if found.choice is not None and not found.why_not:
                return _explain_pieces(call, found, found.choice, changing, reasons)
            if not found.why_not:
                return _explain_fused(call, found, reasons)
            if found.choice is None:
                candidates = found.plan.get("candidates", [])
            reasons += _why_not(call, found, "two fp16 pieces instead" if reasons else "fp16 pieces")
    gemm, launches = _of_fallback(call)
    return {
        "arithmetic": text.arithmetic_text(x.dtype, _torch_arithmetic(call)),
        "candidates": candidates,
        "path": GEMM_ELEMENTWISE if kernels.has_native(x) else REFERENCE,
        "kernel": gemm,
        "reasons": [*reasons, *_fallback_notes(call)],
        "kernels": launches,
    }


def _of_fallback(call: LinearCall) -> tuple[str, list[str]]:
    """torch's GEMM, and every launch."""
    does = fallback.gemm_of(call)
    if does == decisions.WITH_BIAS_AND_RELU:
        gemm = "torch GEMM (_addmm_activation, with the bias and the ReLU)"
        return gemm, [gemm]
    if call.epilogue is BIAS and (call.bias is None or does == decisions.WITH_BIAS):
        gemm = "torch GEMM (mm)" if call.bias is None else "torch GEMM (addmm, with the bias)"
        return gemm, [gemm]
    with_bias = call.epilogue.bias_place is not None and call.x.is_cpu
    gemm = f"torch GEMM ({'addmm, with the bias' if with_bias else 'mm'})"
    return gemm, [gemm, f"{_in_its_own_kernel(call)}, in place on the product"]


def _why_not(call: LinearCall, found: execution.Considered, pieces: str) -> list[str]:
    source = found.plan.get("source", "model")
    why_not = found.why_not
    if source != "model" and "measured" in why_not:
        why_not += f": {tables.source_text(source, found.plan)}"
    if found.choice is None:
        return [f"no fused kernel: {why_not}"]
    return [f"not on {pieces}: {why_not}", *_memory_notes(call, found.arithmetic)]


def _explain_fused(call: LinearCall, found: execution.Considered, reasons: list[str]) -> dict[str, Any]:
    """A call on one kernel that multiplies the tensors as they are."""
    kernel = f"epigemm fused GEMM, {text.tile_text(found.plan)}, epilogue {call.epilogue.name}"
    return {
        "arithmetic": text.arithmetic_text(call.x.dtype, found.arithmetic),
        "candidates": found.plan["candidates"],
        "path": FUSED,
        "kernel": kernel,
        "reasons": [*reasons, _fastest(found.plan, "torch's own path")],
        "kernels": [kernel],
    }


_INVARIANT = (
    "batch invariant: N, K, dtype and precision choose the kernel, not M; nothing splits a sum over K"
)


def _explain_invariant(call: LinearCall) -> dict[str, Any]:
    """A call in the batch-invariant mode."""
    if execution.runs_by_rows(call):
        return _explain_rows(call)
    considered = execution.considered(call)
    are_copied = all(each.why_not for each in considered)
    if are_copied:
        considered = execution.considered_on_copies(call)
    found = next(each for each in considered if not each.why_not)
    before = [_INVARIANT, *(each.why_not for each in considered[: considered.index(found)])]
    arithmetic = text.arithmetic_text(call.x.dtype, found.arithmetic)
    candidates = found.plan["candidates"]
    if found.choice is not None:
        kernel = (
            f"epigemm fused GEMM on fp16 pieces, {text.tile_text(found.plan)}, epilogue {call.epilogue.name}"
        )
        arithmetic = _PIECES_TEXT[found.arithmetic]
        before.append(split.describe_source(found.choice, call.weight))
        launches = split.describe_launches(found.choice, call.x, kernel)
    elif call.x.dtype == torch.float32 and found.arithmetic == _precision.IEEE:
        tile = found.plan["tile"].rpartition("x")[0]
        kernel = f"epigemm fused GEMM in fp32 multiply-adds, tile {tile}, epilogue {call.epilogue.name}"
        launches, candidates = [kernel], []
    else:
        kernel = f"epigemm fused GEMM, {text.tile_text(found.plan)}, epilogue {call.epilogue.name}"
        launches = [kernel]
    if are_copied:
        before.append(
            "tensors that the kernel cannot read or write are copied first, padded to whole 16 bytes for TMA"
        )
    return {
        "arithmetic": arithmetic,
        "path": FUSED,
        "kernel": kernel,
        "reasons": before,
        "candidates": candidates,
        "kernels": launches,
    }


def _explain_rows(call: LinearCall) -> dict[str, Any]:
    """The same on a CPU."""
    kernel = f"torch GEMM ({'addmm' if call.epilogue is BIAS else 'mm'}) of one row"
    after = [] if call.epilogue is BIAS else [f"{_in_its_own_kernel(call)}, in place on the product"]
    return {
        "arithmetic": text.arithmetic_text(call.x.dtype, _torch_arithmetic(call)),
        "path": GEMM_ELEMENTWISE,
        "kernel": kernel,
        "reasons": [_INVARIANT, "on a CPU each row is a call of its own"],
        "kernels": [f"for each row: {launch}" for launch in (kernel, *after)],
    }


def _explain_pieces(
    call: LinearCall, found: execution.Considered, choice: split.Choice, changing: bool, before: list[str]
) -> dict[str, Any]:
    """A call on fp16 slices."""
    plan = found.plan
    kernel = f"epigemm fused GEMM on fp16 pieces, {text.tile_text(plan)}, epilogue {call.epilogue.name}"
    rival = "torch's TF32 GEMM" if found.tf32_allowed else "torch's fp32 GEMM"
    reasons = [
        *before,
        _fastest(plan, rival),
        _CHANGING if changing else split.describe_source(choice, call.weight),
        "a guard on the device finds tiles whose rows have too wide a range for fp16 pieces, or infinities or NaN; "
        "the last launch recomputes them",
        *_memory_notes(call, found.arithmetic),
    ]
    return {
        "path": FUSED,
        "kernel": kernel,
        "arithmetic": _PIECES_TEXT[found.arithmetic],
        "reasons": reasons,
        "candidates": plan["candidates"],
        "kernels": split.describe_launches(choice, call.x, kernel),
    }


_CHANGING = "the weight is split at every call: a gradient of it is asked for, so it is about to change"
_PIECES_TEXT = {
    _precision.SPLIT: "split: three products of two fp16 pieces, float32 accumulation; fp32's accuracy",
    _precision.SCALED: "scaled: products of fp16 numbers, each row scaled to fp16's range, float32 accumulation; "
    "tf32's mantissas",
}


def _fastest(plan: dict[str, Any], rival: str) -> str:
    """Why this kernel: its time, the fallback's, and where they come from."""
    source = plan.get("source", "model")
    how = "by prediction" if source == "model" else "as measured"
    fastest = f"fastest {how} of {len(plan['candidates'])} fused kernels: {plans.fused_us(plan):.1f} us"
    if "fallback_us" in plan:
        fastest += f", against {plans.fallback_us(plan):.1f} us for {rival}"
    return f"{fastest}: {tables.source_text(source, plan)}"


def _memory_notes(call: LinearCall, arithmetic: str) -> list[str]:
    lacked = split.lacked_memory(call, arithmetic)
    notes = []
    if split.MAKE in lacked:
        notes.append("the last call of these sizes found no memory to keep the weight's pack")
    if lacked and lacked != [split.MAKE]:
        notes.append("the last call of these sizes found no memory for fp16 pieces and ran without them")
    return notes


def _explain_elementwise(call: ElementwiseCall) -> dict[str, Any]:
    x = call.x
    checks.elementwise(call)
    if call.out is not None:
        checks.output_overlap(call.out, x, call.others, in_place=True)
    kernel = _in_its_own_kernel(call)
    reason = f"elementwise functions are one kernel; x is {dtype_name(x.dtype)} on {x.device}"
    path = ELEMENTWISE
    if not kernels.has_native(x):
        path, reason = REFERENCE, kernels.why_none(x)
    return {
        "arithmetic": dtype_name(compute_dtype(x.dtype)),
        "path": path,
        "kernel": kernel,
        "reasons": [reason],
        "kernels": [kernel],
    }


def _fallback_notes(call: LinearCall) -> list[str]:
    notes = []
    x, out, device_type = call.x, call.out, call.x.device.type
    if x.dtype == torch.float32 and _precision.needs_override(call.precision, device_type):
        setting = _precision.torch_setting(device_type)
        notes.append(
            f"precision={call.precision!r}: torch's setting {setting!r} is switched to 'ieee' for this GEMM"
        )
    if x.dim() != 2 and not split.flattens(x):
        notes.append("x: its leading dimensions are not one stride apart, torch copies it first")
    if out is not None and out.dim() != 2 and not split.flattens(out):
        notes.append(
            "out: its leading dimensions are not one stride apart, the product is written elsewhere and copied"
        )
    return notes


def _torch_arithmetic(call: LinearCall) -> str:
    """The arithmetic of torch's fp32 GEMM: its setting, unless the call asks for more accuracy."""
    allowed = decisions.order(call).tf32_allowed
    return _precision.torch_setting(call.x.device.type) if allowed else _precision.IEEE
