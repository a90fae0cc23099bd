"""`explain`: which kernels a call would launch, why these, and what was ruled out; it launches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epigemm import checks, decisions, execution, fixed, gradients, packs, plans, split, tables
from epigemm import explain_text as text
from epigemm import precision as _precision
from epigemm.epilogues import BIAS, Epilogue, compute_dtype
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
        path: "fused" (one GEMM kernel with the epilogue in it; fp32 on fp16 pieces needs helpers before and after
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
        fn_or_name: a public function of epigemm, or its name.
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
    operator, epilogue, given, out = recorder.taken_apart()
    op = f"{function}: epigemm::{operator}, epilogue {epilogue.name}: {epilogue.formula}"
    given = recorder.with_gradients(given)
    if operator.startswith("linear"):
        found, backward = _explain_gradients_of_linear(epilogue, given, out, differentiates, wants_gradients)
    else:
        x, _, operands, _ = given
        found, backward = _explain_elementwise(epilogue, given, out), text.backward_elementwise(x, operands)
    if out is not None:
        backward = "none: a call with out= has no derivative"
    elif not differentiates:
        backward = f"not needed: no argument requires grad (otherwise: {backward})"
    folds = [f"{text.owner(given[0])} {fold}" for fold in recorder.folds]
    kernels = [*recorder.casts, *folds, *found.pop("kernels")]
    return Explanation(op=op, backward=backward, kernels=kernels, **found)


_SAVED = (
    "gradients are recorded: the product is saved for the derivative, the epilogue is a kernel of its own "
    "(strict=True: one kernel, and the derivative makes the product again)"
)


def _explain_gradients_of_linear(
    epilogue: Epilogue,
    call: tuple[Any, ...],
    out: Tensor | None,
    differentiates: bool,
    wants_gradients: bool,
) -> tuple[dict[str, Any], str]:
    """The forward and the backward pass, of which the former may depend on the latter."""
    x, weight, bias, operands, scalars, precision, pack_use, strict, invariant = call
    backward = text.backward_linear(epilogue, x, operands, strict=strict)
    saves = gradients.keeps_product(epilogue, x, operands, strict)
    if out is not None or not differentiates or not saves:
        return _explain_linear(epilogue, call, out, wants_gradients), backward
    checks.linear(epilogue, x, weight, bias, operands, scalars, precision, None)
    product = (x, weight, bias, (), (), precision, pack_use, strict, invariant)
    found = _explain_linear(BIAS, product, None, wants_gradients)
    found["path"] = GEMM_ELEMENTWISE if execution.has_native_kernels(x) else REFERENCE
    found["reasons"] = [_SAVED, *found["reasons"]]
    found["kernels"] = [*found["kernels"], f"{text.owner(x)} {epilogue.name}"]
    return found, backward


def _explain_linear(
    epilogue: Epilogue, call: tuple[Any, ...], out: Tensor | None, wants_gradients: bool
) -> dict[str, Any]:
    x, weight, bias, operands, scalars, precision, pack_use, strict, invariant = call
    checks.linear(epilogue, x, weight, bias, operands, scalars, precision, out)
    if out is not None:
        checks.output_overlap(out, x, (weight, bias, *operands), in_place=False)
    changing = wants_gradients and weight.requires_grad
    pack_use = packs.NONE if changing else pack_use
    if strict:
        execution.require_fused(epilogue, x, weight, bias, operands, scalars, precision, out, pack_use)
    if invariant:
        road = fixed.choose(epilogue, x, weight, precision)
        if road.kind != fixed.EMPTY:
            return _explain_fixed(epilogue, x, weight, precision, road, out, pack_use)
    plan: dict[str, Any] = {}
    reasons: list[str] = []
    unavailable = execution.no_kernels(x)
    if unavailable:
        reasons.append(f"no fused kernel: {unavailable}")
    else:
        written = x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
        tried = (epilogue, x, weight, bias, operands, scalars, precision, written, pack_use)
        for found in execution.considered(*tried):
            if found.choice is not None and not found.why_not:
                return _explain_pieces(epilogue, x, weight, found, found.choice, changing, reasons)
            if not found.why_not:
                return _explain_fused(epilogue, x, found, reasons)
            if found.choice is None:
                plan = found.plan
            reasons += _why_not(x, weight, found, "two fp16 pieces instead" if reasons else "fp16 pieces")
    reasons += _second_path_notes(x, precision, out)
    does = execution.gemm_of(epilogue, x, weight, bias, operands, scalars, precision, out)
    with_relu = does == decisions.WITH_BIAS_AND_RELU
    with_bias = epilogue is BIAS and (bias is None or does == decisions.WITH_BIAS)
    gemm = "torch GEMM (mm)"
    if with_relu:
        gemm = "torch GEMM (_addmm_activation, with the bias and the ReLU)"
    elif bias is not None and with_bias:
        gemm = "torch GEMM (addmm, with the bias)"
    kernels = [gemm]
    if not with_bias and not with_relu:
        kernels.append(f"{text.owner(x)} {epilogue.name}, in place on the product")
    return {
        "arithmetic": text.arithmetic_text(x.dtype, _torch_arithmetic(x, precision)),
        "candidates": plan.get("candidates", []),
        "path": GEMM_ELEMENTWISE if execution.has_native_kernels(x) else REFERENCE,
        "kernel": gemm,
        "reasons": reasons,
        "kernels": kernels,
    }


def _why_not(x: Tensor, weight: Tensor, found: execution.Considered, pieces: str) -> list[str]:
    source = found.plan.get("source", "model")
    why_not = found.why_not
    if source != "model" and "measured" in why_not:
        why_not += f": {tables.source_text(source, found.plan)}"
    if found.choice is None:
        return [f"no fused kernel: {why_not}"]
    return [f"not on {pieces}: {why_not}", *_memory_notes(x, weight, found.arithmetic)]


def _explain_fused(
    epilogue: Epilogue, x: Tensor, found: execution.Considered, reasons: list[str]
) -> dict[str, Any]:
    """A call on one kernel that multiplies the tensors as they are."""
    kernel = f"epigemm fused GEMM, {text.tile_text(found.plan)}, epilogue {epilogue.name}"
    return {
        "arithmetic": text.arithmetic_text(x.dtype, found.arithmetic),
        "candidates": found.plan["candidates"],
        "path": FUSED,
        "kernel": kernel,
        "reasons": [*reasons, _fastest(found.plan, x, "torch's own path")],
        "kernels": [kernel],
    }


_INVARIANT = (
    "batch invariant: N, K, dtype and precision choose the kernel, not M; nothing splits a sum over K"
)


def _explain_fixed(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    precision: str,
    road: fixed.Road,
    out: Tensor | None,
    pack_use: str,
) -> dict[str, Any]:
    """A call in the batch-invariant mode."""
    before = [_INVARIANT, *road.passed_over]
    if road.kind == fixed.ROWS:
        gemm = "torch GEMM (mm) of one row" if epilogue is not BIAS else "torch GEMM (addmm) of one row"
        kernels = (
            [gemm]
            if epilogue is BIAS
            else [gemm, f"{text.owner(x)} {epilogue.name}, in place on the product"]
        )
        return {
            "arithmetic": text.arithmetic_text(x.dtype, _torch_arithmetic(x, precision)),
            "path": GEMM_ELEMENTWISE,
            "kernel": gemm,
            "reasons": [*before, "on a CPU each row is a call of its own"],
            "kernels": [f"for each row: {kernel}" for kernel in kernels],
        }
    if road.kind == fixed.FP32:
        kernel = f"epigemm fused GEMM in fp32 multiply-adds, tile 128x64, epilogue {epilogue.name}"
        arithmetic = text.arithmetic_text(x.dtype, _precision.IEEE)
        launches = [kernel]
    elif road.kind == fixed.PIECES:
        kernel = f"epigemm fused GEMM on fp16 pieces, {text.tile_text(road.plan)}, epilogue {epilogue.name}"
        arithmetic = _PIECES_TEXT[road.arithmetic]
        written = x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
        choice = split.choose_fixed(weight, road.arithmetic, written, pack_use)
        before.append(split.describe_source(choice, weight))
        launches = split.describe_launches(choice, x, kernel)
    else:
        kernel = f"epigemm fused GEMM, {text.tile_text(road.plan)}, epilogue {epilogue.name}"
        arithmetic = text.arithmetic_text(x.dtype, road.arithmetic)
        before.append("tensors that TMA cannot read or write are copied and padded to whole 16 bytes first")
        launches = [kernel]
    return {
        "arithmetic": arithmetic,
        "path": FUSED,
        "kernel": kernel,
        "reasons": before,
        "candidates": road.plan.get("candidates", []),
        "kernels": launches,
    }


def _explain_pieces(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    found: execution.Considered,
    choice: split.Choice,
    changing: bool,
    before: list[str],
) -> dict[str, Any]:
    """A call on fp16 pieces."""
    plan = found.plan
    kernel = f"epigemm fused GEMM on fp16 pieces, {text.tile_text(plan)}, epilogue {epilogue.name}"
    rival = "torch's TF32 GEMM" if found.tf32_allowed else "torch's fp32 GEMM"
    reasons = [
        *before,
        _fastest(plan, x, rival),
        _CHANGING if changing else split.describe_source(choice, weight),
        "a guard on the device finds tiles whose rows have too wide a range for fp16 pieces, or infinities or NaN; "
        "the last launch recomputes them",
        *_memory_notes(x, weight, found.arithmetic),
    ]
    return {
        "path": FUSED,
        "kernel": kernel,
        "arithmetic": _PIECES_TEXT[found.arithmetic],
        "reasons": reasons,
        "candidates": plan["candidates"],
        "kernels": split.describe_launches(choice, x, kernel),
    }


_CHANGING = "the weight is split at every call: a gradient of it is asked for, so it is about to change"
_PIECES_TEXT = {
    _precision.SPLIT: "split: three products of two fp16 pieces, float32 accumulation; fp32's accuracy",
    _precision.SCALED: "scaled: products of fp16 numbers, each row scaled to fp16's range, float32 accumulation; "
    "tf32's mantissas",
}


def _fastest(plan: dict[str, Any], x: Tensor, rival: str) -> str:
    """Why this kernel: its time, that of torch's own path, and where they come from."""
    source = plan.get("source", "model")
    how = "by prediction" if source == "model" else "as measured"
    fastest = f"fastest {how} of {len(plan['candidates'])} fused kernels: {plans.fused_us(plan):.1f} us"
    if "fallback_us" in plan:
        fastest += f", against {plans.fallback_us(plan):.1f} us for {rival}"
    return f"{fastest}: {tables.source_text(source, plan)}"


def _memory_notes(x: Tensor, weight: Tensor, arithmetic: str) -> list[str]:
    lacked = split.lacked_memory(x, weight, arithmetic)
    notes = []
    if split.MAKE in lacked:
        notes.append("the last call of these sizes found no memory to keep the weight's pack")
    if lacked and lacked != [split.MAKE]:
        notes.append("the last call of these sizes found no memory for fp16 pieces and ran without them")
    return notes


def _explain_elementwise(epilogue: Epilogue, call: tuple[Any, ...], out: Tensor | None) -> dict[str, Any]:
    x, bias, operands, scalars = call
    checks.elementwise(epilogue, x, bias, operands, scalars, out)
    if out is not None:
        checks.output_overlap(out, x, (bias, *operands), in_place=True)
    kernel = f"{text.owner(x)} {epilogue.name}"
    reason = f"elementwise functions are one kernel; x is {dtype_name(x.dtype)} on {x.device}"
    path = ELEMENTWISE
    if not execution.has_native_kernels(x):
        path, reason = REFERENCE, execution.no_kernels(x)
    return {
        "arithmetic": dtype_name(compute_dtype(x.dtype)),
        "path": path,
        "kernel": kernel,
        "reasons": [reason],
        "kernels": [kernel],
    }


def _second_path_notes(x: Tensor, precision: str, out: Tensor | None) -> list[str]:
    notes = []
    device_type = x.device.type
    if x.dtype == torch.float32 and _precision.needs_override(precision, device_type):
        setting = _precision.torch_setting(device_type)
        notes.append(
            f"precision={precision!r}: torch's setting {setting!r} is switched to 'ieee' for this GEMM"
        )
    if x.dim() != 2 and not split.flattens(x):
        notes.append("x: its leading dimensions are not one stride apart, torch copies it first")
    if out is not None and out.dim() != 2 and not split.flattens(out):
        notes.append(
            "out: its leading dimensions are not one stride apart, the product is written elsewhere and copied"
        )
    return notes


def _torch_arithmetic(x: Tensor, precision: str) -> str:
    """What torch's own fp32 GEMM computes in: its setting, unless the call asks for more accuracy."""
    if not execution.linear_roads(x, precision).tf32_allowed:
        return _precision.IEEE
    return _precision.torch_setting(x.device.type)
