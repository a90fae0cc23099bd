"""From the public functions to the kernels: who sees a call?

Nobody: a plain call, which the entry answers (`epigemm.calls.entry`), or the cold path where something stands in the
way (`epigemm.calls.execution`). Autograd alone: a node of `epigemm.autograd`, for small layers PyTorch's own; the entry
says so.
Anybody else, be it a tracer, a mode, a transform or a subclass: the operators `torch.ops.epigemm.*`, which are right
everywhere and take the host longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from epigemm._native import ops
from epigemm.arguments import checks, invariance
from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall, Vectors
from epigemm.arguments.precision import DEFAULT, needs_override
from epigemm.autograd import nodes
from epigemm.calls import elementwise_kernels, entry, execution
from epigemm.epilogues.registry import (
    BIAS,
    FOLDED,
    SCALE_BATCH_NORM,
    Epilogue,
    compute_dtype,
    fold_batch_norm_reference,
)
from epigemm.operators import compiled
from epigemm.operators import registration as _registration  # noqa: F401
from epigemm.packs import keep_mode, weight_packs
from epigemm.packs.weight_packs import PackedWeight

# Looked up once: a plain call is measured in hundreds of nanoseconds.
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_tracing_state = torch._C._get_tracing_state
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_functional = torch._is_functional_tensor
_has_function_mode = torch._C._is_torch_function_mode_enabled
_function_modes: Any = torch.overrides._get_current_function_mode_stack
_any_autocast = torch._C._is_any_autocast_enabled
_has_autocast = torch.amp.is_autocast_available

_PLAIN = 0  # no gradient is recorded, and no tracer, mode or transform is on
_RECORDED = 1  # the same, but some tensor requires a gradient
_DISPATCHED = 2  # everything else: the call goes through `torch.ops`


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    scalar: float | Tensor | None,  # the epilogue's
    precision: str | None,  # None for torch's setting
    out: Tensor | None,  # where the result goes
    strict: bool = False,  # no fallback
    pack_use: str | None = None,  # `weight_packs.KEEP` for a module's own; None: `epigemm.keep_packs` decides
    fold: tuple[Any, ...] | None = None,  # of scale_batch_norm, the vectors of `FOLDED` and then eps
) -> Tensor:
    """D = epilogue(x @ weight.T), for an epilogue with a bias and at most one scalar, or with folded vectors."""
    if isinstance(weight, PackedWeight):
        weight, pack_use = weight.weight, weight_packs.KEEP
    found: Tensor | entry.Recorded | None
    if _is_compiling():
        x, weight, bias, fold = _cast(x, weight, bias, fold)
        found = compiled.linear(epilogue, x, weight, bias, scalar, fold, precision, out, strict)
    else:
        given: tuple[Any, ...] = () if fold is not None else (bias,)
        given = given if epilogue.scalar is None else (*given, scalar)
        found = entry.linear(epilogue, x, weight, given, fold, precision, out, pack_use, strict)
    if isinstance(found, Tensor):
        return found
    if found is entry.RECORDED_BY_TORCH:
        return nodes.linear_by_torch(epilogue, x, weight, bias)
    who = _RECORDED
    if found is None:
        who = _checked({"x": x, "weight": weight}, {"bias": bias, **_named(fold), "out": out}, scalar)
        x, weight, bias, fold = _cast(x, weight, bias, fold)
    vectors = _named(fold)
    operands, scalars = scalar_operand(epilogue, scalar, x)
    options = _options(who, x, weight, precision, strict, pack_use)
    if fold is None:
        return _linear(who, LinearCall(epilogue, x, weight, bias, operands, scalars, *options, out))
    # All launches are checked before the first one.
    checks.linear(LinearCall(BIAS, x, weight, fold[0], (), (), *options, out))
    folded = checks.fold_batch_norm(x, fold[:-1], fold[-1], weight.shape[0])
    if who == _PLAIN:
        if out is not None:
            checks.output_overlap(out, x, {"weight": weight, **vectors}, in_place=False)
        likes = x.new_empty((2, folded.columns), dtype=compute_dtype(x.dtype)).unbind(0)
        execution.refuse(LinearCall(epilogue, x, weight, None, likes, (), *options, out))
    if fold[0] is not None and not strict and _rounds_product(who, x, out):
        # The product is rounded to 16 bits. As in PyTorch, the bias is added before that.
        product = linear(BIAS, x, weight, fold[0], None, precision, None, False, pack_use)
        return elementwise(epilogue, product, None, None, out, (None, *fold[1:]))
    operands = _fold(who, folded, out)
    return _linear(who, LinearCall(epilogue, x, weight, None, operands, (), *options, out), checked=True)


def _rounds_product(who: int, x: Tensor, out: Tensor | None) -> bool:
    """Whether a call that the entry has not answered may be no fused kernel, and rounds its product to 16 bits."""
    modes = () if _is_compiling() or not _has_function_mode() else _function_modes()
    is_explained = any(
        getattr(mode, "wants_one_call", False) for mode in modes
    )  # explain wants to see one call
    if x.dtype not in (torch.float16, torch.bfloat16) or is_explained:
        return False
    return x.is_cpu or _any_autocast() if who == _PLAIN else out is None


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
    bias, *others = vectors
    if all(vector is None for vector in others):
        return linear(BIAS, x, weight, bias, None, precision, out, strict, pack_use)
    fold = (*vectors, eps)
    return linear(SCALE_BATCH_NORM, x, weight, None, None, precision, out, strict, pack_use, fold)


def linear_linked(call: LinearCall, precision: str | None, pack_use: str | None, recorded: bool) -> Tensor:
    """D = epilogue(x @ weight.T) for a matrix x; operands as the operators take them, the rest as of `linear`.

    `recorded`: whether the entry has seen the call, and that autograd alone has to do with it.
    """
    epilogue, x, weight, _, operands, scalars, _, _, strict, _, out = call
    who = _RECORDED if recorded else _who_sees((x, weight, out, *operands))
    options = _options(who, x, weight, precision, strict, pack_use)
    call = LinearCall(epilogue, x, weight, None, operands, scalars, *options, out)
    # A second try: what the entry could not read, such as an integer for a scalar, is a float now.
    found = entry.linear_operator(call) if who == _PLAIN else None
    return _linear(who, call) if found is None else found


def _options(
    who: int, x: Tensor, weight: Tensor, precision: str | None, strict: bool, pack_use: str | None
) -> tuple[str, str, bool, bool]:
    """What a caller has asked for, checked: precision, pack use, strict, and whether rows may depend on others."""
    asked = DEFAULT if precision is None else checks.precision(precision)
    if _is_compiling():
        asked = compiled.resolved(asked, x)
    if strict is not False:
        checks.flag("strict", strict)
    if who == _RECORDED and weight.requires_grad:
        # The weight is being trained: a pack that is kept now would be stale at the next call.
        pack_use = weight_packs.NONE
    if pack_use is None:
        pack_use = keep_mode.pack_use(weight) if keep_mode.active or keep_mode.traced else weight_packs.FIND
    return asked, pack_use, strict, invariance.active and invariance.enabled()


def elementwise_linked(call: ElementwiseCall, recorded: bool) -> Tensor:
    """D = epilogue(x) for a matrix x; operands as the operators take them, `recorded` as of `linear_linked`."""
    who = _RECORDED if recorded else _who_sees((call.x, call.out, *call.operands))
    found = entry.elementwise_operator(call) if who == _PLAIN else None
    return _elementwise(who, call) if found is None else found


def _linear(who: int, call: LinearCall, *, checked: bool = False) -> Tensor:
    """A call that the entry has not answered."""
    if who == _RECORDED and call.out is None:
        return nodes.linear(call, checked=checked)
    if who == _PLAIN:
        return execution.linear(call)
    if _in_functional_derivative():
        return _linear_reference(call)
    # Taken apart: Dynamo of torch 2.10 traces no property of a NamedTuple.
    epilogue, x, weight, bias, operands, scalars, precision, *others, out = call
    product = (epilogue.name, x, weight, bias, operands, scalars, precision)
    if out is None:
        result: Tensor = ops.linear(*product, *others)
        return result
    ops.linear_out(*product, out, *others)
    return out


def elementwise(
    epilogue: Epilogue,
    x: Tensor,
    bias: Tensor | None,
    scalar: float | Tensor | None,
    out: Tensor | None,
    fold: tuple[Any, ...] | None = None,
) -> Tensor:
    """D = epilogue(x), for an epilogue with at most a bias and one scalar, or with folded vectors as of `linear`."""
    found: Tensor | entry.Recorded | None
    if _is_compiling():
        found = compiled.elementwise(epilogue, x, bias, scalar, fold, out)
    else:
        given: tuple[Any, ...] = () if fold is not None or not epilogue.takes_bias else (bias,)
        given = given if epilogue.scalar is None else (*given, scalar)
        found = entry.elementwise(epilogue, x, given, fold, out)
    if isinstance(found, Tensor):
        return found
    who, vectors = _RECORDED, _named(fold)
    if found is None:
        who = _checked({"x": x}, {"bias": bias, **vectors, "out": out}, scalar)
    operands, scalars = scalar_operand(epilogue, scalar, x)
    if fold is not None:
        checks.rows_of_vectors(x)
        checks.elementwise(ElementwiseCall(BIAS, x, None, (), (), out))
        folded = checks.fold_batch_norm(x, fold[:-1], fold[-1], x.shape[-1])
        if who == _PLAIN and out is not None:
            checks.output_overlap(out, x, vectors, in_place=True)
        operands = _fold(who, folded, out)
    return _elementwise(who, ElementwiseCall(epilogue, x, bias, operands, scalars, out))


def _elementwise(who: int, call: ElementwiseCall) -> Tensor:
    """A call that the entry has not answered."""
    epilogue, x, bias, operands, scalars, out = call
    if who == _RECORDED and out is None:
        return nodes.elementwise(call)
    if who == _PLAIN:
        return execution.elementwise(call)
    if _in_functional_derivative():
        checks.elementwise(call)
        _refuse_out(out)
        return epilogue.reference(x, bias, operands, scalars)
    if out is None:
        result: Tensor = ops.elementwise(epilogue.name, x, bias, operands, scalars)
        return result
    ops.elementwise_out(epilogue.name, x, bias, operands, scalars, out)
    return out


def fold(like: Tensor, vectors: Vectors, eps: float, columns: int) -> tuple[Tensor, ...]:
    """Multiplier and offset that `vectors` (those of `FOLDED`) fold into, in the epilogue's arithmetic."""
    folded = checks.fold_batch_norm(like, vectors, eps, columns)
    return _fold(_who_sees((like, *vectors)), folded, None)


def _named(vectors: Sequence[Any] | None) -> dict[str, Any]:
    """The vectors that are folded, by name, without the eps that may follow them."""
    return {} if vectors is None else dict(zip(FOLDED, vectors, strict=False))


def _fold(who: int, call: FoldCall, out: Tensor | None) -> tuple[Tensor, ...]:
    """Multiplier and offset. They are recorded or dispatched as the call that reads them is."""
    if who == _RECORDED and out is None and any(v is not None and v.requires_grad for v in call.vectors):
        return nodes.fold_batch_norm(call)
    if who == _PLAIN or (who == _RECORDED and out is None):
        return elementwise_kernels.fold_batch_norm(call).unbind(0)
    like, _, vectors, eps = call
    if _in_functional_derivative():
        return fold_batch_norm_reference(like, vectors, eps).unbind(0)
    # The fold reads the dtype and the device of x alone. If x kept its gradient, autograd would record the fold as a
    # function of x, and the layer's derivative would be made for operands that need a gradient.
    like = like.detach() if like.requires_grad else like
    folded: Tensor = ops.fold_batch_norm(like, *vectors, eps)
    return folded.unbind(0)


def _in_functional_derivative() -> bool:
    """Whether `torch.func.grad`, `jvp` or what builds on them is at work.

    torch does not compose them with the derivatives of registered operators. The references compose with everything.
    """
    if _is_compiling():
        return False
    interpreters = torch._C._functorch.get_interpreter_stack()
    return interpreters is not None and any(i.key() in _DERIVATIVES for i in interpreters)


def _linear_reference(call: LinearCall) -> Tensor:
    """The call by plain operations of PyTorch, one kernel each."""
    x = call.x
    if call.invariant:
        raise RuntimeError(
            "batch_invariant: got a call under a derivative of torch.func, where plain PyTorch operations compute it; "
            "accepted there are calls outside of the mode"
        )
    checks.linear(call)
    _refuse_out(call.out)
    if call.strict:
        raise RuntimeError(
            "strict: got True under a derivative of torch.func, where no fused kernel runs; accepted there is False"
        )
    if x.dtype == torch.float32 and needs_override(call.precision, x.device.type):
        raise NotImplementedError(
            f"precision: got {call.precision!r} under a derivative of torch.func, where torch's fp32 setting is less "
            "accurate; accepted is None, or change torch's setting"
        )
    # The bias in the product: to 16 bits it is rounded once, with the bias, as in PyTorch.
    call = call.with_bias_in_product()
    product = torch.nn.functional.linear(x, call.weight, call.bias)
    return call.epilogue.reference(product, None, call.operands, call.scalars)


def _refuse_out(out: Tensor | None) -> None:
    if out is not None:
        raise RuntimeError(
            "out: got a tensor under a derivative of torch.func; accepted is None, out= has no derivative"
        )


def _checked(required: dict[str, Any], optional: dict[str, Any], scalar: object) -> int:
    """Who sees a call that the entry leaves open; TypeError unless its arguments are tensors."""
    checks.tensors(**required)
    checks.optional_tensors(**optional)
    number = scalar if isinstance(scalar, Tensor) else None
    return _who_sees((*required.values(), *optional.values(), number))


def _who_sees(arguments: tuple[object, ...]) -> int:
    """`_PLAIN`, `_RECORDED` or `_DISPATCHED`."""
    if (
        _is_compiling()
        or _functorch_interpreter() is not None
        or _dispatch_modes()
        or _has_function_mode()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return _DISPATCHED
    grad = _grad_enabled() and not _inference()
    who = _PLAIN
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            if grad and argument.requires_grad:  # type: ignore[attr-defined]
                who = _RECORDED
        elif argument is not None:
            return _DISPATCHED
    return _DISPATCHED if who == _RECORDED and _wraps_another(arguments) else who


def _wraps_another(arguments: tuple[Any, ...]) -> bool:
    """Whether some tensor wraps another one, for a transform of torch that has ended or has no level."""
    tests = (_is_functorch_wrapped, _is_legacy_batched, _is_functional)
    return any(test(argument) for argument in arguments if argument is not None for test in tests)


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


def _cast(
    x: Tensor, weight: Tensor, bias: Tensor | None, fold: tuple[Any, ...] | None
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Any, ...] | None]:
    """What autocast casts of a call: of the folded vectors the first, which is the bias."""
    if not _any_autocast():
        return x, weight, bias, fold
    if fold is None:
        x, weight, (bias,) = autocast(x, weight, bias)
        return x, weight, bias, fold
    x, weight, first = autocast(x, weight, fold[0])
    return x, weight, bias, (*first, *fold[1:])


def autocast(
    x: Tensor, weight: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The matrix product's inputs as autocast wants them: its dtype for floating tensors, fp64 left alone."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return x, weight, biases  # the checks raise the error
    device_type = x.device.type
    # `is_autocast_enabled` raises for devices without autocast, such as meta. Dynamo of torch 2.11 cannot trace that.
    if not (_is_compiling() or _has_autocast(device_type)) or not torch.is_autocast_enabled(device_type):
        return x, weight, biases
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        wide = tensor.dtype == torch.float64 or not tensor.is_floating_point()
        return tensor if wide or tensor.device.type != device_type else tensor.to(dtype)

    return cast(x), cast(weight), tuple(None if bias is None else cast(bias) for bias in biases)
