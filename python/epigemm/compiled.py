"""Calls in compiled graphs: operators of the native module, which run without Python.

`torch.ops.epigemm.linear` is right everywhere, and takes the host longer than a kernel: its own is written in Python.
While Dynamo traces, calls that nobody but the kernels has to see become `_linear_into` and its like in its place, which
write into a tensor that the graph allocates. What stands in the way of a call at run time (`entry.Reason`) has them
call back here. Exported programs hold the public operators: names that stay, in files that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm import checks, entry, execution, packs, plans
from epigemm import precision as _precision
from epigemm._native import ops
from epigemm.epilogues import BIAS, EPILOGUES, FOLDED, SCALE_BATCH_NORM, Epilogue

_is_exporting = torch.compiler.is_exporting
_grad_enabled = torch.is_grad_enabled
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BY_NUMBER = {epilogue.number: epilogue for epilogue in EPILOGUES.values()}
_HOPPER = 9
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _at_trace_time(function: _Function) -> _Function:
    """`function`, which Dynamo runs in place of tracing it: what it returns is a constant of the graph.

    As `torch.compiler.assume_constant_result`, which would import all of Dynamo here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_at_trace_time
def _precision_now(device_type: str) -> str:
    return _precision.resolved(device_type)


@_at_trace_time
def _code(precision: str, device_type: str) -> int:
    return _precision.code(precision, device_type)


@_at_trace_time
def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@_at_trace_time
def _has_kernels(device_type: str, index: int | None) -> bool:
    """Whether the native operators run there. Brings in what was measured on a GPU, as a first call does."""
    if device_type == "cuda":
        return plans._usable(torch.cuda.current_device() if index is None else index)
    return device_type == "cpu"


@_at_trace_time
def _takes_slices(device_type: str, index: int | None, code: int) -> bool:
    """Whether an fp32 call may run on fp16 slices, whose packs are kept in Python."""
    if device_type != "cuda" or code not in _precision.FIRST_SLICES or plans.no_gemm_kernels():
        return False
    return torch.cuda.get_device_capability(index)[0] == _HOPPER


def resolved(precision: str, x: Tensor) -> str:
    """A call's precision, by its name: torch's setting is looked up while the call is traced.

    Dynamo compiles again when that changes; exported programs keep what they were exported with.
    """
    if precision != _precision.DEFAULT or x.dtype is not torch.float32:
        return precision
    return _precision_now(x.device.type)


def takes_linear(
    x: Tensor,
    weight: Tensor,
    others: Sequence[Tensor | None],
    precision: str,
    out: Tensor | None,
    invariant: bool,
) -> bool:
    """Whether `linear` or `linear_folded` of this module may stand for a call that is traced.

    `precision`: resolved.
    """
    if out is not None or invariant or execution.on_first_call is not None:
        return False
    if not _are_plain((x, weight, *others)) or x.dim() == 0 or weight.dim() != 2:
        return False
    if x.dtype is not torch.float32:
        return True
    code = _code(precision, x.device.type)
    # The last bit: torch's setting has to be switched for the call, which is done in Python.
    return not code & 1 and not _takes_slices(x.device.type, x.device.index, code)


def takes_elementwise(x: Tensor, others: Sequence[Tensor | None], out: Tensor | None) -> bool:
    """Whether `elementwise` or `elementwise_folded` of this module may stand for a call that is traced."""
    return out is None and _are_plain((x, *others))


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether Dynamo traces, and nobody but the kernels has to see a call on these tensors, x first."""
    if _is_exporting() or _is_transformed():
        return False
    x = tensors[0]
    grad = _grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        if (kind is not Tensor and kind is not Parameter) or (grad and tensor.requires_grad):
            return False
    return x is not None and x.dtype in _DTYPES and _has_kernels(x.device.type, x.device.index)


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    strict: bool,
) -> Tensor:
    """D = epilogue(x @ weight.T)."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    given = _flat(epilogue, operands, scalars)
    ops._linear_into(epilogue.number, x, weight, bias, *given, _fp32(x, precision), strict, out)
    return out


def linear_folded(
    x: Tensor, weight: Tensor, vectors: Sequence[Tensor | None], eps: float, precision: str, strict: bool
) -> Tensor:
    """D = multiplier * (x @ weight.T) + offset, both folded from `vectors` (those of `FOLDED`)."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    ops._linear_folded_into(x, weight, *vectors, eps, _fp32(x, precision), strict, out)
    return out


def elementwise(
    epilogue: Epilogue, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
) -> Tensor:
    """D = epilogue(x)."""
    out = torch.empty_like(x)
    ops._elementwise_into(epilogue.number, x, bias, *_flat(epilogue, operands, scalars), out)
    return out


def elementwise_folded(x: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    """D = multiplier * x + offset, both folded from `vectors` (those of `FOLDED`)."""
    out = torch.empty_like(x)
    ops._elementwise_folded_into(x, *vectors, eps, out)
    return out


Flat = tuple[Tensor | None, Tensor | None, Tensor | None, float]


def _flat(epilogue: Epilogue, operands: Sequence[Tensor], scalars: Sequence[float]) -> Flat:
    """Two vectors, a scalar as a tensor and one as a number: lists take the host longer than the call."""
    vectors = operands[: len(epilogue.vectors)]
    rest = operands[len(epilogue.vectors) :]
    return (
        vectors[0] if len(vectors) > 0 else None,
        vectors[1] if len(vectors) > 1 else None,
        rest[0] if rest else None,
        scalars[0] if scalars else 0.0,
    )


def _nested(epilogue: Epilogue, flat: Flat) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """What `_flat` was given."""
    *tensors, number = flat
    operands = tuple(tensor for tensor in tensors if tensor is not None)
    takes_number = epilogue.scalar is not None and tensors[-1] is None
    return operands, (number,) if takes_number else ()


def _fp32(x: Tensor, precision: str) -> int:
    return _code(precision, x.device.type) if x.dtype is torch.float32 else 0


# --- what the operators call where they do not answer, and fake kernels ----------------------------------------------


def _linear_cold(number: int, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    *flat, fp32, strict, out = rest
    epilogue = _epilogue(number)
    operands, scalars = _nested(epilogue, (flat[0], flat[1], flat[2], flat[3]))
    _run_linear(epilogue, x, weight, bias, operands, scalars, fp32, strict, out)


def _run_linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    fp32: int,
    strict: bool,
    out: Tensor,
) -> None:
    precision = _precision.named(fp32) if x.dtype is torch.float32 else _precision.DEFAULT
    vectors = operands[: len(epilogue.vectors)] or None
    rest = operands[len(epilogue.vectors) :]
    scalar = rest[0] if rest else scalars[0] if scalars else None
    asked = None if precision == _precision.DEFAULT else precision
    if entry.linear(epilogue, x, weight, bias, scalar, vectors, asked, out, packs.FIND, strict) is not None:
        return
    checks.linear(epilogue, x, weight, bias, operands, scalars, precision, out)
    checks.output_overlap(out, x, (weight, bias, *operands), in_place=False)
    execution.linear_forward(epilogue, x, weight, bias, operands, scalars, precision, out, strict=strict)


def _linear_folded_cold(x: Tensor, weight: Tensor, *rest: Any) -> None:
    *vectors, eps, fp32, strict, out = rest
    folded = _fold(x, vectors, eps, weight.shape[0])
    _run_linear(SCALE_BATCH_NORM, x, weight, None, folded, (), fp32, strict, out)


def _elementwise_cold(number: int, x: Tensor, bias: Tensor | None, *rest: Any) -> None:
    *flat, out = rest
    epilogue = _epilogue(number)
    operands, scalars = _nested(epilogue, (flat[0], flat[1], flat[2], flat[3]))
    _run_elementwise(epilogue, x, bias, operands, scalars, out)


def _run_elementwise(
    epilogue: Epilogue,
    x: Tensor,
    bias: Tensor | None,
    operands: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    out: Tensor,
) -> None:
    checks.elementwise(epilogue, x, bias, operands, scalars, out)
    checks.output_overlap(out, x, (bias, *operands), in_place=True)
    execution.elementwise_forward(epilogue, x, bias, operands, scalars, out)


def _elementwise_folded_cold(x: Tensor, *rest: Any) -> None:
    *vectors, eps, out = rest
    checks.rows_of_vectors(x)
    folded = _fold(x, vectors, eps, x.shape[-1])
    _run_elementwise(SCALE_BATCH_NORM, x, None, folded, (), out)


def _fold(x: Tensor, vectors: Sequence[Tensor | None], eps: float, columns: int) -> tuple[Tensor, ...]:
    checks.fold_batch_norm(x, dict(zip(FOLDED, vectors, strict=True)), eps, columns)
    return execution.fold_batch_norm_forward(x, columns, vectors, eps).unbind(0)


def _epilogue(number: int) -> Epilogue:
    if number not in _BY_NUMBER:
        raise ValueError(f"epilogue: got {number}; accepted are the numbers of the registry, {list(_BY_NUMBER)}")
    return _BY_NUMBER[number]


def _reporting(run: Callable[..., None]) -> Callable[..., Tensor | None]:
    """`run`, but an error is returned, as text: the native module that calls it sees no exceptions."""

    def cold(*args: Any) -> Tensor | None:
        try:
            run(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, it becomes the operator's RuntimeError
            return torch.frombuffer(bytearray(str(error).encode() or b"error"), dtype=torch.uint8)
        return None

    return cold


def _linear_fake(number: int, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    *flat, fp32, strict, out = rest
    epilogue = _epilogue(number)
    operands, scalars = _nested(epilogue, (flat[0], flat[1], flat[2], flat[3]))
    checks.linear(epilogue, x, weight, bias, operands, scalars, _precision.DEFAULT, out)


def _linear_folded_fake(x: Tensor, weight: Tensor, *rest: Any) -> None:
    *vectors, eps, fp32, strict, out = rest
    checks.linear(BIAS, x, weight, vectors[0], (), (), _precision.DEFAULT, out)
    checks.fold_batch_norm(x, dict(zip(FOLDED, vectors, strict=True)), eps, weight.shape[0])


def _elementwise_fake(number: int, x: Tensor, bias: Tensor | None, *rest: Any) -> None:
    *flat, out = rest
    epilogue = _epilogue(number)
    operands, scalars = _nested(epilogue, (flat[0], flat[1], flat[2], flat[3]))
    checks.elementwise(epilogue, x, bias, operands, scalars, out)


def _elementwise_folded_fake(x: Tensor, *rest: Any) -> None:
    *vectors, eps, out = rest
    checks.rows_of_vectors(x)
    checks.elementwise(BIAS, x, None, (), (), out)
    checks.fold_batch_norm(x, dict(zip(FOLDED, vectors, strict=True)), eps, x.shape[-1])


_LIBRARY = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]


def _register() -> None:
    for name, cold, fake in (
        ("linear", _linear_cold, _linear_fake),
        ("linear_folded", _linear_folded_cold, _linear_folded_fake),
        ("elementwise", _elementwise_cold, _elementwise_fake),
        ("elementwise_folded", _elementwise_folded_cold, _elementwise_folded_fake),
    ):
        _LIBRARY.impl(f"_{name}_cold", _reporting(cold), "CompositeExplicitAutograd")
        torch.library.register_fake(f"epigemm::_{name}_into", fake, lib=_LIBRARY)


_register()
