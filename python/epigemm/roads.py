"""From the public functions to the kernels: who has to see a call?

Nobody: a plain call, which the entry answers (`epigemm.entry`), or the cold path where something stands in the way
(`epigemm.execution`). Autograd alone: a node of `epigemm.autograd`. Anybody else, be it a tracer, a mode, a transform
or a subclass: the operators `torch.ops.epigemm.*`, which are right everywhere and take the host longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from epigemm import autograd, checks, compiled, entry, execution, fixed, invariance, keeping, packs
from epigemm import registration as _registration  # noqa: F401  # with torch
from epigemm._native import ops
from epigemm.epilogues import (
    BIAS,
    FOLDED,
    SCALE_BATCH_NORM,
    Epilogue,
    compute_dtype,
    fold_batch_norm_reference,
)
from epigemm.packs import PackedWeight
from epigemm.precision import DEFAULT, needs_override

# Looked up once: the direct road is measured in hundreds of nanoseconds.
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_tracing_state = torch._C._get_tracing_state
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_functional = torch._is_functional_tensor
_has_function_mode = torch._C._is_torch_function_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled

_PLAIN = 0  # nothing between Python and the kernels has to do with the call
_RECORDED = 1  # autograd alone has: some tensor requires a gradient
_DISPATCHED = 2  # anything else: the operators find out


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    scalar: float | Tensor | None,
    precision: str | None,
    out: Tensor | None,
    strict: bool = False,
    pack_use: str | None = None,
) -> Tensor:
    """D = epilogue(x @ weight.T), for an epilogue with a bias and at most one scalar.

    `pack_use`: what the call may do with the weight's pack, `packs.KEEP` for a module's own; None for a plain call, for
    which `epigemm.keep_packs` decides.
    """
    if isinstance(weight, PackedWeight):
        weight, pack_use = weight.weight, packs.KEEP
    if _is_compiling():
        if _any_autocast():
            x, weight, bias = _autocast(x, weight, bias)
        found = compiled.linear(epilogue, x, weight, bias, scalar, precision, out, strict)
    else:
        found = entry.linear(epilogue, x, weight, bias, scalar, None, precision, out, pack_use, strict)
    if found is not None:
        return found
    given = (x, weight, bias, out, scalar if isinstance(scalar, Tensor) else None)
    road = _DISPATCHED if x is None or weight is None else _road(given)
    if road == _DISPATCHED:
        checks.tensors(x=x, weight=weight)
        checks.optional_tensors(bias=bias, out=out)
    if _any_autocast():
        x, weight, bias = _autocast(x, weight, bias)
    if pack_use is None:
        pack_use = _pack_use(weight)
    operands, scalars = scalar_operand(epilogue, scalar, x)
    precision = DEFAULT if precision is None else checks.precision(precision)
    if strict is not False:
        checks.flag("strict", strict)
    invariant = invariance.active and invariance.enabled()
    if road == _RECORDED and out is None:
        return autograd.linear(
            epilogue, x, weight, bias, operands, scalars, precision, pack_use, strict, invariant
        )
    if road != _PLAIN:
        return _call_linear(
            epilogue, x, weight, bias, operands, scalars, precision, out, pack_use, strict, invariant
        )
    checks.linear(epilogue, x, weight, bias, operands, scalars, precision, out)
    if out is not None:
        checks.output_overlap(out, x, (weight, bias, *operands), in_place=False)
    forward = fixed.linear_forward if invariant else execution.linear_forward
    result = forward(
        epilogue, x, weight, bias, operands, scalars, precision, out, pack_use=pack_use, strict=strict
    )
    if out is not None:
        entry.mark_written(out)
    return result


def linear_folded(
    x: Tensor,
    weight: Tensor | PackedWeight,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    precision: str | None,
    out: Tensor | None,
    strict: bool = False,
    pack_use: str | None = None,
) -> Tensor:
    """D = multiplier * (x @ weight.T) + offset, both folded from `vectors` (those of `FOLDED`)."""
    if all(vector is None for vector in vectors):
        return linear(BIAS, x, weight, None, None, precision, out, strict, pack_use)
    if isinstance(weight, PackedWeight):
        weight, pack_use = weight.weight, packs.KEEP
    if _is_compiling():
        if _any_autocast():
            x, weight, bias = _autocast(x, weight, vectors[0])
            vectors = (bias, *vectors[1:])
        found = compiled.linear_folded(x, weight, vectors, eps, precision, out, strict)
    else:
        found = entry.linear(
            SCALE_BATCH_NORM, x, weight, None, None, (*vectors, eps), precision, out, pack_use, strict
        )
    if found is not None:
        return found
    road = _DISPATCHED if x is None or weight is None else _road((x, weight, out, *vectors))
    if road == _DISPATCHED:
        checks.tensors(x=x, weight=weight)
        checks.optional_tensors(out=out, **dict(zip(FOLDED, vectors, strict=True)))
    if _any_autocast():
        x, weight, bias = _autocast(x, weight, vectors[0])
        vectors = (bias, *vectors[1:])
    if pack_use is None:
        pack_use = _pack_use(weight)
    precision = DEFAULT if precision is None else checks.precision(precision)
    checks.flag("strict", strict)
    # All launches are checked before the first one.
    checks.linear(BIAS, x, weight, vectors[0], (), (), precision, out)
    columns = checks.fold_batch_norm(x, dict(zip(FOLDED, vectors, strict=True)), eps, weight.shape[0])
    invariant = invariance.active and invariance.enabled()
    if road == _RECORDED and out is None:
        operands = _recorded_fold(x, columns, vectors, eps)
        call = (SCALE_BATCH_NORM, x, weight, None, operands, (), precision, pack_use, strict, invariant)
        return autograd.linear(*call, checked=True)
    if road != _PLAIN:
        operands = _call_fold(x, vectors, eps)
        return _call_linear(
            SCALE_BATCH_NORM, x, weight, None, operands, (), precision, out, pack_use, strict, invariant
        )
    if out is not None:
        checks.output_overlap(out, x, (weight, *vectors), in_place=False)
    if strict:
        likes = x.new_empty((2, columns), dtype=compute_dtype(x.dtype)).unbind(0)
        execution.require_fused(SCALE_BATCH_NORM, x, weight, None, likes, (), precision, out, pack_use)
    if invariant:
        fixed.choose(SCALE_BATCH_NORM, x, weight, precision)
    operands = execution.fold_batch_norm_forward(x, columns, vectors, eps).unbind(0)
    forward = fixed.linear_forward if invariant else execution.linear_forward
    result = forward(
        SCALE_BATCH_NORM, x, weight, None, operands, (), precision, out, pack_use=pack_use, strict=strict
    )
    if out is not None:
        entry.mark_written(out)
    return result


def _pack_use(weight: Tensor) -> str:
    return keeping.pack_use(weight) if keeping.active or keeping.traced else packs.FIND


def _call_linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    pack_use: str,
    strict: bool,
    invariant: bool,
) -> Tensor:
    if _is_compiling():
        precision = compiled.resolved(precision, x)
    if _in_functional_derivative():
        if invariant:
            raise RuntimeError(
                "batch_invariant: got a call under torch.func.grad or jvp, where plain PyTorch operations compute it; "
                "accepted there are calls outside of the mode"
            )
        return _linear_reference(epilogue, x, weight, bias, operands, scalars, precision, out, strict)
    if out is None:
        result: Tensor = ops.linear(
            epilogue.name, x, weight, bias, operands, scalars, precision, pack_use, strict, invariant
        )
        return result
    ops.linear_out(
        epilogue.name, x, weight, bias, operands, scalars, precision, out, pack_use, strict, invariant
    )
    return out


def elementwise(
    epilogue: Epilogue, x: Tensor, bias: Tensor | None, scalar: float | Tensor | None, out: Tensor | None
) -> Tensor:
    """D = epilogue(x), for an epilogue with at most a bias and one scalar."""
    if _is_compiling():
        found = compiled.elementwise(epilogue, x, bias, scalar, out)
    else:
        found = entry.elementwise(epilogue, x, bias, scalar, None, out)
    if found is not None:
        return found
    given = (x, bias, out, scalar if isinstance(scalar, Tensor) else None)
    road = _DISPATCHED if x is None else _road(given)
    if road == _DISPATCHED:
        checks.tensors(x=x)
        checks.optional_tensors(bias=bias, out=out)
    operands, scalars = scalar_operand(epilogue, scalar, x)
    if road == _RECORDED and out is None:
        return autograd.elementwise(epilogue, x, bias, operands, scalars)
    if road != _PLAIN:
        return _call_elementwise(epilogue, x, bias, operands, scalars, out)
    checks.elementwise(epilogue, x, bias, operands, scalars, out)
    if out is not None:
        checks.output_overlap(out, x, (bias, *operands), in_place=True)
        entry.mark_written(out)
    return execution.elementwise_forward(epilogue, x, bias, operands, scalars, out)


def elementwise_folded(
    x: Tensor, vectors: tuple[Tensor | None, ...], eps: float, out: Tensor | None
) -> Tensor:
    """D = multiplier * x + offset, both folded from `vectors` (those of `FOLDED`)."""
    if _is_compiling():
        found = compiled.elementwise_folded(x, vectors, eps, out)
    else:
        found = entry.elementwise(SCALE_BATCH_NORM, x, None, None, (*vectors, eps), out)
    if found is not None:
        return found
    road = _DISPATCHED if x is None else _road((x, out, *vectors))
    if road == _DISPATCHED:
        checks.tensors(x=x)
        checks.optional_tensors(out=out, **dict(zip(FOLDED, vectors, strict=True)))
    checks.rows_of_vectors(x)
    checks.elementwise(BIAS, x, None, (), (), out)
    columns = checks.fold_batch_norm(x, dict(zip(FOLDED, vectors, strict=True)), eps, x.shape[-1])
    if road == _RECORDED and out is None:
        operands = _recorded_fold(x, columns, vectors, eps)
        return autograd.elementwise(SCALE_BATCH_NORM, x, None, operands, ())
    if road != _PLAIN:
        operands = _call_fold(x, vectors, eps)
        return _call_elementwise(SCALE_BATCH_NORM, x, None, operands, (), out)
    if out is not None:
        checks.output_overlap(out, x, vectors, in_place=True)
        entry.mark_written(out)
    operands = execution.fold_batch_norm_forward(x, columns, vectors, eps).unbind(0)
    return execution.elementwise_forward(SCALE_BATCH_NORM, x, None, operands, (), out)


def _call_elementwise(
    epilogue: Epilogue,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    out: Tensor | None,
) -> Tensor:
    if _in_functional_derivative():
        checks.elementwise(epilogue, x, bias, operands, scalars, out)
        _refuse_out(out)
        return epilogue.reference(x, bias, operands, scalars)
    if out is None:
        result: Tensor = ops.elementwise(epilogue.name, x, bias, operands, scalars)
        return result
    ops.elementwise_out(epilogue.name, x, bias, operands, scalars, out)
    return out


def _recorded_fold(x: Tensor, columns: int, vectors: Sequence[Tensor | None], eps: float) -> Sequence[Tensor]:
    if any(vector is not None and vector.requires_grad for vector in vectors):
        return autograd.fold_batch_norm(x, columns, vectors, eps)
    return execution.fold_batch_norm_forward(x, columns, vectors, eps).unbind(0)


def _call_fold(x: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Sequence[Tensor]:
    fold = fold_batch_norm_reference if _in_functional_derivative() else _fold_operator
    return fold(x, vectors, eps).unbind(0)


def _fold_operator(x: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    # Only the type and the device of x are read: without this, autograd would take the fold for a function of x, and
    # the layer's derivative would be made for operands that need a gradient.
    like = x.detach() if x.requires_grad else x
    folded: Tensor = ops.fold_batch_norm(like, *vectors, eps)
    return folded


def _in_functional_derivative() -> bool:
    """Whether `torch.func.grad`, `jvp` or what builds on them is at work.

    torch does not compose them with the derivatives of registered operators. The references compose with everything.
    """
    if _is_compiling():
        return False
    interpreters = torch._C._functorch.get_interpreter_stack()
    return interpreters is not None and any(i.key() in _DERIVATIVES for i in interpreters)


def _linear_reference(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor | None,
    strict: bool,
) -> Tensor:
    checks.linear(epilogue, x, weight, bias, operands, scalars, precision, out)
    _refuse_out(out)
    if strict:
        raise RuntimeError(
            "strict: got True under torch.func.grad or jvp, where no fused kernel runs; accepted there is False"
        )
    if x.dtype == torch.float32 and needs_override(precision, x.device.type):
        raise NotImplementedError(
            f"precision: got {precision!r} under torch.func.grad or jvp, where torch's fp32 setting is less accurate; "
            "accepted is None, or change torch's setting"
        )
    # The bias in the product: to 16 bits it is rounded once, with the bias, as unfused.
    return epilogue.reference(torch.nn.functional.linear(x, weight, bias), None, operands, scalars)


def _refuse_out(out: Tensor | None) -> None:
    if out is not None:
        raise RuntimeError(
            "out: got a tensor under torch.func.grad or jvp; accepted is None, out= has no derivative"
        )


def _road(arguments: tuple[object, ...]) -> int:
    """Which road a call with these tensors takes: `_PLAIN`, `_RECORDED` or `_DISPATCHED`."""
    if (
        _is_compiling()
        or _functorch_interpreter() is not None
        or _dispatch_modes()
        or _has_function_mode()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return _DISPATCHED
    grad = _grad_enabled()
    road = _PLAIN
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            if grad and argument.requires_grad:  # type: ignore[attr-defined]
                road = _RECORDED
        elif argument is not None:
            return _DISPATCHED
    return _DISPATCHED if road == _RECORDED and _wraps_another(arguments) else road


def _wraps_another(arguments: tuple[Any, ...]) -> bool:
    """Whether some tensor stands for another one, of a transformation of torch's that is over or has no level."""
    for argument in arguments:
        if argument is not None and (
            _is_functorch_wrapped(argument) or _is_legacy_batched(argument) or _is_functional(argument)
        ):
            return True
    return False


def scalar_operand(
    epilogue: Epilogue, scalar: float | Tensor | None, x: Tensor
) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """The scalar as the operators take it: a tensor operand or a number."""
    if epilogue.scalar is None:
        return (), ()
    if type(scalar) is float:
        return (), (scalar,)
    name = epilogue.scalar.name
    if isinstance(scalar, Tensor):
        checks.scalar_tensor(name, scalar, x)
        return (scalar.to(compute_dtype(x.dtype)),), ()
    return (), (checks.scalar_number(name, scalar),)


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The matrix product's inputs as autocast wants them: its dtype for floating tensors, fp64 left alone."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return x, weight, bias  # the checks say so
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        wide = tensor.dtype == torch.float64 or not tensor.is_floating_point()
        return tensor if wide or tensor.device.type != device_type else tensor.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)
