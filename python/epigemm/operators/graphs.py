"""Calls in compiled graphs: operators in C++, which run without Python.

`torch.ops.epigemm.linear` works everywhere, but its kernel is in Python and takes the host longer than a GPU kernel.
While Dynamo traces, plain calls become `_linear_into` and the other native operators instead. They write into a tensor
that the graph allocates. If one of them gets a reason instead of a result (`planner.reasons`), it calls back to this
module. Exported programs hold the public operators, because a file needs names that do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm._native import ops
from epigemm.arguments import checks, invariance
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import FIND, ElementwiseCall, LinearCall
from epigemm.calls import elementwise_kernels, resolve, resolve_elementwise
from epigemm.compilers import at_trace_time, is_exporting, is_traced
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.registry import EPILOGUES, LINKED, Epilogue, Operands, compute_dtype
from epigemm.planner import plans
from epigemm.planner.reasons import Reason

_linear_into = ops._linear_into.default
_linear_folded_into = ops._linear_folded_into.default
_linear_flat_into = ops._linear_flat_into.default
_elementwise_into = ops._elementwise_into.default
_elementwise_folded_into = ops._elementwise_folded_into.default

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BY_NUMBER = {epilogue.number: epilogue for epilogue in EPILOGUES.values()}
_NOT_NATIVE = -1


Seen = tuple[Any, ...]
"""What a trace needs of a tensor: dtype, device, dimensions, `requires_grad`. Empty for a number or None."""


@at_trace_time
def _fp32_order(has_scalar: bool, tensors: tuple[Seen | None, ...], precision: object, strict: object) -> int:
    """The number of a linear call's `Order`; `_NOT_NATIVE` if the operator `linear` has to compute the call.

    `tensors`: x, weight, the others; `has_scalar`: whether the last of them is an epilogue's scalar.
    """
    if not _is_native(has_scalar, tensors) or not isinstance(strict, bool):
        return _NOT_NATIVE
    weight = tensors[1]
    if not weight or weight[2] != 2:
        return _NOT_NATIVE
    if precision is not None and not (isinstance(precision, str) and precision in _precision.ARITHMETIC):
        return _NOT_NATIVE
    dtype, device, *_ = tensors[0] or ()
    if dtype is not torch.float32:
        return _precision.ORDERS[0].number
    order = _precision.order(precision, device.type)
    if device.type == "cpu":
        # Dynamo does not guard the CPU setting. Such a call may have to switch it later, which only Python does.
        return _NOT_NATIVE if _precision.is_full(precision) else order.number
    return _NOT_NATIVE if order.overrides or _takes_slices(device, order) else order.number


@at_trace_time
def _is_native(has_scalar: bool, tensors: tuple[Seen | None, ...]) -> bool:
    """Whether a call is plain, and the C++ operators can read it. Arguments as of `_fp32_order`."""
    x, scalar = tensors[0], tensors[-1]
    if not x or x[0] not in _DTYPES or any(tensor is None for tensor in tensors):
        return False
    if has_scalar and scalar and (scalar[0] not in _DTYPES or scalar[1:3] != (x[1], 0)):
        return False
    if is_exporting() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch.is_grad_enabled() and any(tensor[3] for tensor in tensors if tensor):
        return False
    device = x[1]
    if plans.gpu_numbers(-1 if device.index is None else device.index):
        return False  # a GPU that only tests describe, whose kernels are replacements in Python
    if device.type == "cuda":
        # This loads what was measured on the device, as a first call does.
        return plans.usable(torch.cuda.current_device() if device.index is None else device.index)
    return bool(device.type == "cpu")


def _takes_slices(device: torch.device, order: _precision.Order) -> bool:
    """Whether an fp32 call may run on fp16 slices, whose packs are kept in Python."""
    return device.type == "cuda" and bool(order.slices) and not plans.no_gemm_kernels()


def resolved(precision: str, x: Tensor) -> str:
    """The name of a call's precision. torch's setting is looked up while the call is traced.

    Dynamo compiles again when the setting for CUDA changes. It does not guard the setting for CPUs, which graphs look
    up at run time. Exported programs keep the setting of their export.
    """
    if precision != _precision.DEFAULT or x.dtype is not torch.float32:
        return precision
    return _precision_now(x.device.type)


@at_trace_time
def _precision_now(device_type: str) -> str:
    is_guarded = device_type == "cuda" or is_exporting()
    return _precision.resolved(device_type) if is_guarded else _precision.DEFAULT


def is_constant(number: float) -> bool:
    """Whether a number is a constant of the trace, and no symbol: as a number that has changed, or of a size."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow, but Dynamo has it

    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        return True  # the checks raise the error
    return has_static_value(number)


def is_symbol(number: Any) -> TypeGuard[float]:
    """Whether a scalar is a symbol of the trace that goes on here."""
    # For Dynamo, which traces this, all numbers have the types of constants.
    return (is_traced() or isinstance(number, (torch.SymInt, torch.SymFloat))) and not is_constant(number)


def scalar(name: str, value: Any, x: Tensor) -> float | Tensor:
    """An epilogue's scalar: a number that is a symbol of the trace as a 0-d tensor, any other as it is.

    The operators take numbers as constants, so their graph would be compiled again for each value.
    """
    if isinstance(value, Tensor):
        return value
    if not is_constant(value):
        return on_device(value, x)
    return value if type(value) is float else checks.scalar_number(name, value)


def on_device(number: float, x: Tensor) -> Tensor:
    """A number as a 0-d tensor in fp64. It is a product: compilers keep one graph of it for all values."""
    symbol: float = torch.sym_float(number)  # type: ignore[no-untyped-call]
    return x.new_ones((), dtype=torch.float64) * symbol


# Each function and each global that Dynamo traces below becomes a guard, which takes time at each call of the graph.
# Tests that need no guard are in the functions above. Wrong arguments are found by the fake kernels.


def _see(tensor: object) -> Seen | None:
    """What a trace needs of a plain tensor; None for other values."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor.dtype, tensor.device, tensor.dim(), tensor.requires_grad  # type: ignore[attr-defined]
    return () if tensor is None or kind is float or kind is int else None


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Operands,
    fold: tuple[Any, ...] | None,
    precision: str | None,
    out: Tensor | None,
    strict: bool,
) -> Tensor | Reason:
    """D = epilogue(x @ weight.T), arguments as of `route.linear`; or `NOT_PLAIN`."""
    if out is not None or invariance.active or not epilogue.is_compiled:
        return Reason.NOT_PLAIN
    if fold is not None and type(fold[-1]) is not float:
        return Reason.NOT_PLAIN
    others = tuple(map(_see, operands if fold is None else fold[:-1]))
    order = _fp32_order(epilogue.has_scalar, (_see(x), _see(weight), *others), precision, strict)
    if order == _NOT_NATIVE:
        return Reason.NOT_PLAIN
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if fold is not None:
        _linear_folded_into(x, weight, *fold, order, strict, out)
    else:
        _linear_into(epilogue.number, x, weight, *_places(epilogue, operands, x), order, strict, out)
    return out


def elementwise(
    epilogue: Epilogue,
    x: Tensor,
    operands: Operands,
    fold: tuple[Any, ...] | None,
    out: Tensor | None,
) -> Tensor | Reason:
    """D = epilogue(x), as `linear`."""
    if out is not None or not epilogue.is_compiled or (fold is not None and type(fold[-1]) is not float):
        return Reason.NOT_PLAIN
    others = tuple(map(_see, operands if fold is None else fold[:-1]))
    if not _is_native(epilogue.has_scalar, (_see(x), *others)):
        return Reason.NOT_PLAIN
    out = torch.empty_like(x)
    if fold is not None:
        _elementwise_folded_into(x, *fold, out)
    else:
        _elementwise_into(epilogue.number, x, *_places(epilogue, operands, x), out)
    return out


def _places(
    epilogue: Epilogue, operands: Operands, x: Tensor
) -> tuple[Tensor | None, None, None, Tensor | None, float]:
    """The operands of such an epilogue, a bias and at most one scalar, as the C++ operators take them."""
    bias = epilogue.bias_among(operands)
    scalar = operands[-1] if epilogue.has_scalar else None
    if isinstance(scalar, Tensor):
        return bias, None, None, scalar.to(compute_dtype(x.dtype)), 0.0
    return bias, None, None, None, 0.0 if scalar is None else float(scalar)


# --- in graphs that Inductor compiles ---------------------------------------------------------------------------------

_MOST_OPERANDS = 12  # of an epilogue; the operator has an argument for each
_is_for_inductor = ContextVar("_is_for_inductor", default=False)
FLAT_ON = ("cuda",)
"""The devices whose calls become C++ operators there. On a CPU a linked epilogue runs in Python."""


@contextmanager
def for_inductor() -> Iterator[None]:
    """In the block, traces are compiled by Inductor, which allocates the tensor that such an operator writes."""
    token = _is_for_inductor.set(True)
    try:
        yield
    finally:
        _is_for_inductor.reset(token)


def digest_of(name: str) -> int:
    """A hash of an epilogue's name. It is the same in every process; the number of a linked epilogue is not.

    As csrc/torch/compiled.cpp computes it: FNV-1a, without a sign.
    """
    digest = 0xCBF29CE484222325
    for letter in name.encode():
        digest = (digest ^ letter) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return digest >> 1


def flat(call: LinearCall) -> Tensor | None:
    """A call in a trace for Inductor, as a C++ operator; None if the operator `linear` has to compute it."""
    if not _is_for_inductor.get():
        return None
    epilogue, x, weight, given, _, pack_use, strict, invariant, out, *_ = call
    if (
        any(isinstance(each, float) for each in given)
        or pack_use != FIND
        or strict
        or invariant
        or out is not None
        or weight.dim() != 2
    ):
        return None
    tensors = [x, weight, *(each for each in given if isinstance(each, Tensor))]
    seen = tuple((each.dtype, each.device, each.dim(), each.requires_grad) for each in tensors)
    if x.device.type not in FLAT_ON or not _is_native(False, seen) or call.order.overrides:
        return None
    out = call.new_out()
    places = (*given, *[None] * (_MOST_OPERANDS - len(given)))
    _linear_flat_into(epilogue.number, digest_of(epilogue.name), x, weight, *places, call.order.number, out)
    return out


# --- what the C++ operators call where they cannot compute a call, and fake kernels
# ----------------------------------------------


def _operands(number: int, bias: Tensor | None, flat: Sequence[Any]) -> tuple[Epilogue, Operands]:
    """An epilogue and its operands, from the arguments of the C++ operators."""
    epilogue = _BY_NUMBER.get(number)
    if epilogue is None:
        raise ValueError(
            f"epilogue: got {number}; accepted are the numbers of the registry, {list(_BY_NUMBER)}"
        )
    *tensors, value = flat
    takes_number = epilogue.has_scalar and tensors[-1] is None
    given = [each for each in tensors if each is not None]
    operands = epilogue.in_order(bias, given, (value,) if takes_number else ())
    if operands is None:
        raise checks.operands_that_do_not_fit(epilogue, (bias, *given))
    return epilogue, operands


def _linear_call(number: int, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> LinearCall:
    *flat, fp32, strict, out = rest
    epilogue, operands = _operands(number, bias, flat)
    return LinearCall(epilogue, x, weight, operands, _named(fp32, x), strict=strict, out=out)


def _flat_call(_: int, digest: int, x: Tensor, weight: Tensor, *rest: Any) -> LinearCall:
    *places, fp32, out = rest
    every = (*EPILOGUES.values(), *LINKED.values())
    epilogue = next((each for each in every if digest_of(each.name) == digest), None)
    if epilogue is None:
        raise RuntimeError(
            "epilogue: got the digest of one that this process has not made; accepted is one of a graph that was "
            "compiled here"
        )
    count = len(epilogue.operands)
    if any(each is not None for each in places[count:]):
        raise checks.operands_that_do_not_fit(epilogue, places)
    return LinearCall(epilogue, x, weight, tuple(places[:count]), _named(fp32, x), out=out)


def _elementwise_call(number: int, x: Tensor, bias: Tensor | None, *rest: Any) -> ElementwiseCall:
    *flat, out = rest
    epilogue, operands = _operands(number, bias, flat)
    return ElementwiseCall(epilogue, x, operands, out)


def _named(fp32: int, x: Tensor) -> str:
    """The name of the precision with this `Order`."""
    return _precision.ORDERS[fp32].name if x.dtype is torch.float32 and x.is_cuda else _precision.DEFAULT


def _linear_folded_cold(x: Tensor, weight: Tensor, *rest: Any) -> None:
    *vectors, eps, fp32, strict, out = rest
    fold = checks.fold_batch_norm(x, vectors, eps, weight.shape[0])
    call = LinearCall(SCALE_BATCH_NORM, x, weight, (), _named(fp32, x), strict=strict, out=out)
    resolve.linear(call, fold=fold)


def _elementwise_folded_cold(x: Tensor, *rest: Any) -> None:
    *vectors, eps, out = rest
    checks.rows_of_vectors(x)
    folded = elementwise_kernels.fold_batch_norm(checks.fold_batch_norm(x, vectors, eps, x.shape[-1])).unbind(
        0
    )
    resolve_elementwise.elementwise(ElementwiseCall(SCALE_BATCH_NORM, x, folded, out))


def _reporting(run: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """`run`, but an error is returned as text, because exceptions do not reach the C++ code that calls it."""

    def cold(*args: Any) -> Tensor | None:
        try:
            run(*args)
        except Exception as error:  # any error becomes the operator's RuntimeError
            return torch.frombuffer(bytearray(str(error).encode() or b"error"), dtype=torch.uint8)
        return None

    return cold


def _linear_folded_fake(x: Tensor, weight: Tensor, *rest: Any) -> None:
    *vectors, eps, _, _, out = rest
    checks.linear(LinearCall(BIAS, x, weight, vectors[:1], out=out))
    checks.fold_batch_norm(x, vectors, eps, weight.shape[0])


def _elementwise_folded_fake(x: Tensor, *rest: Any) -> None:
    *vectors, eps, out = rest
    checks.rows_of_vectors(x)
    checks.elementwise(ElementwiseCall(BIAS, x, out=out))
    checks.fold_batch_norm(x, vectors, eps, x.shape[-1])


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "linear": (
        lambda *args: resolve.run_linear(_linear_call(*args)),
        lambda *args: checks.linear(_linear_call(*args)),
    ),
    "linear_folded": (_linear_folded_cold, _linear_folded_fake),
    "linear_flat": (
        lambda *args: resolve.run_linear(_flat_call(*args)),
        lambda *args: checks.linear(_flat_call(*args)),
    ),
    "elementwise": (
        lambda *args: resolve_elementwise.elementwise(_elementwise_call(*args)),
        lambda *args: checks.elementwise(_elementwise_call(*args)),
    ),
    "elementwise_folded": (_elementwise_folded_cold, _elementwise_folded_fake),
}
_LIBRARY = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]
for _name, (_cold, _fake) in _OPERATORS.items():
    _LIBRARY.impl(f"_{_name}_cold", _reporting(_cold), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"epigemm::_{_name}_into", _fake, lib=_LIBRARY)
