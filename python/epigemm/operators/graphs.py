"""Calls in compiled graphs: an operator in C++, which runs without Python.

`torch.ops.epigemm.linear` works everywhere, but its kernel is in Python and takes the host longer than a GPU kernel.
While Dynamo traces, plain calls become the operator `_into` instead. So do the others in graphs that Inductor compiles,
those of derivatives included. It writes into a tensor that the graph allocates. If it gets a reason instead of a result
(`planner.reasons`), it calls `_cold`, which is in this module. Exported programs hold the public operators, because a
file needs names that do not change.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm._native import ops
from epigemm.arguments import checks, invariance
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall
from epigemm.autograd import nodes
from epigemm.calls import by_reference, elementwise_kernels, one_kernel, resolve
from epigemm.compilers import at_trace_time, is_exporting, untraced
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.registry import EPILOGUES, FOLDED, LINKED, Epilogue, Operands, compute_dtype
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason

_into = ops._into.default
_addmm_activation = torch.ops.aten._addmm_activation.out
_ORDERS, _FOLDS, _USES_PACK, _STRICT = (
    15,
    16,
    32,
    64,
)  # in the argument `options`, as in csrc/torch/compiled.cpp

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
        is_full = precision is not None and order.fused[0] in (_precision.IEEE, _precision.SPLIT)
        return _NOT_NATIVE if is_full else order.number
    return _NOT_NATIVE if order.overrides else order.number


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
    return _precision.order(None, device_type).name if is_guarded else _precision.DEFAULT


# Each function and each global that Dynamo traces below becomes a guard, which takes time at each call of the graph.
# Tests that need no guard are in the functions above. Wrong arguments are found by the fake kernels.


def _see(tensor: object) -> Seen | None:
    """What a trace needs of a plain tensor; None for other values."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor.dtype, tensor.device, tensor.dim(), tensor.requires_grad  # type: ignore[attr-defined]
    return () if tensor is None or kind is float or kind is int else None


def native(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor | None,  # None: of an elementwise call
    operands: Operands,
    fold: tuple[Any, ...] | None,
    out: Tensor | None,
    precision: str | None = None,
    strict: bool = False,
) -> Tensor | Reason:
    """A call in a graph by `_into`, arguments as of `route.linear`; or `NOT_PLAIN`."""
    if out is not None or not epilogue.is_compiled or (fold is not None and type(fold[-1]) is not float):
        return Reason.NOT_PLAIN
    others = tuple(map(_see, operands if fold is None else fold[:-1]))
    if weight is None:
        order = 0 if _is_native(epilogue.has_scalar, (_see(x), *others)) else _NOT_NATIVE
    elif invariance.active:
        order = _NOT_NATIVE
    else:
        order = _fp32_order(epilogue.has_scalar, (_see(x), _see(weight), *others), precision, strict)
    if order == _NOT_NATIVE:
        return Reason.NOT_PLAIN
    out = torch.empty_like(x) if weight is None else x.new_empty((*x.shape[:-1], weight.shape[0]))
    tensors: Operands = operands
    number = 0.0  # in the place of the last operand, which alone may be one; of a fold its eps
    if fold is not None:
        *tensors, number = fold
    elif epilogue.has_scalar:
        *before, scalar = operands
        if isinstance(scalar, Tensor):
            tensors = [*before, scalar.to(compute_dtype(x.dtype))]
        else:
            tensors, number = [*before, None], 0.0 if scalar is None else float(scalar)
    _write(epilogue, x, weight, tensors, number, fold is not None, order, True, strict, out)
    return out


def _write(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor | None,
    tensors: Operands,
    number: float,
    folds: bool,
    order: int,
    uses_pack: bool,
    strict: bool,
    out: Tensor,
    stored: Tensor | None = None,
) -> None:
    """The operator `_into`: `number` is that of an operand that is None, or the eps where `folds`.

    `stored`: receives the second values of an epilogue that has some.
    """
    x = x if weight is None else _by_rows(x)
    places: list[Any] = [*tensors, *[None] * (2 - len(tensors))]
    first, second, *others = places
    options = order + _FOLDS * folds + _USES_PACK * uses_pack + _STRICT * strict
    name = digest_of(epilogue.name)
    _into(epilogue.number, name, x, weight, first, second, others or None, number, options, out, stored)


def _by_rows(x: Tensor) -> Tensor:
    """x, or a copy where no single stride leads from row to row. The kernel that makes x may write the copy."""
    if x.is_contiguous():
        return x
    axes = [axis for axis in range(x.dim() - 1) if x.shape[axis] != 1]
    reached = (x.stride(axis) == x.stride(of) * x.shape[of] for axis, of in itertools.pairwise(axes))
    return x if all(reached) else x.contiguous()


@at_trace_time
def digest_of(name: str) -> int:
    """A hash of an epilogue's name. It is the same in every process; the number of a linked epilogue is not.

    As csrc/torch/compiled.cpp computes it: FNV-1a, without a sign.
    """
    return _digest_of(name)


@functools.cache
def _digest_of(name: str) -> int:
    digest = 0xCBF29CE484222325
    for letter in name.encode():
        digest = (digest ^ letter) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return digest >> 1


# --- in graphs that Inductor compiles ---------------------------------------------------------------------------------

NATIVE_ON = ("cuda",)
"""The devices whose calls become `_into` there. On a CPU a linked epilogue runs in Python."""


def in_inductor(call: LinearCall | ElementwiseCall, stored: Tensor | None = None) -> Any:
    """A call in a graph for Inductor, by `_into`; NotImplemented if its public operator has to compute it.

    Autograd has seen it, also one of a derivative. `stored`: as of `_write`.
    """
    epilogue, x, given = call.epilogue, call.x, call.operands
    tensors = [each if isinstance(each, Tensor) else None for each in given]
    number, *more = [each for each in given if each is not None and not isinstance(each, Tensor)] or [0.0]
    seen = tuple((each.dtype, each.device, each.dim(), False) for each in call.inputs)
    if more or type(number) is not float or x.device.type not in NATIVE_ON or not _is_native(False, seen):
        return NotImplemented
    if not isinstance(call, LinearCall):
        out = torch.empty_like(x)
        _write(epilogue, x, None, tensors, number, False, 0, True, False, out)
        return out
    if call.invariant or call.weight.dim() != 2 or call.order.overrides:
        return NotImplemented
    call = call._replace(x=_by_rows(x))
    if epilogue.is_bias and _is_torchs(call):
        return by_reference.product(call.x, call.weight, call.bias)
    out = call.new_out()
    order = call.order.number
    _write(
        epilogue, call.x, call.weight, tensors, number, False, order, call.uses_pack, call.strict, out, stored
    )
    return out


def with_product_in_inductor(call: LinearCall) -> Any:
    """The same of a call and its product: by one kernel where that is planned for constant sizes, else by two.

    Of the epilogue behind a product that is PyTorch's Inductor makes one kernel with what else follows.
    """
    call = call._replace(x=_by_rows(call.x))
    both = call._replace(epilogue=call.epilogue.with_product)
    if plans.has_gpu_kernels(call.x) and one_kernel.may_store(both):
        if not _has_constant_sizes(both):
            return NotImplemented
        if _is_planned(both, fused=True):
            stored = call.new_out()
            result = in_inductor(both, stored)
            return result if result is NotImplemented else (result, stored)
    alone = call.product()
    product = in_inductor(alone)
    if product is NotImplemented:
        return product
    behind = call.behind(product)
    if _is_torchs(alone):
        return behind.epilogue.reference(product, behind.operands), product
    result = in_inductor(behind)
    return result if result is NotImplemented else (result, product)


def _is_torchs(product: LinearCall) -> bool:
    """Whether PyTorch's GEMM computes a product of constant sizes, which takes the host less time without `_into`."""
    may_be = plans.has_gpu_kernels(product.x) and not product.strict and not weight_packs.owners
    return may_be and _is_planned(product, fused=False)


def _has_constant_sizes(call: LinearCall) -> bool:
    return all(isinstance(size, int) for each in call.inputs for size in (*each.shape, *each.stride()))


def _is_planned(call: LinearCall, *, fused: bool) -> bool:
    """Whether a call of constant sizes is one kernel of ours that reads tensors as a trace's lie; or PyTorch's GEMM."""
    if not _has_constant_sizes(call):
        return False
    with untraced():  # this is no part of the graph
        x, weight, *operands = [_described(each) for each in (call.x, call.weight, *call.operands)]
        like = call._replace(x=x, weight=weight, operands=tuple(operands))
        found = dry_runs.dry_run(like, place=torch.empty(0, device=call.x.device))
    return found.fused and found.copies_nothing if fused else not found.fused


def _described(given: Any) -> Any:
    """A tensor without data that lies like one; numbers are themselves."""
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


# --- what the operator calls where it cannot compute a call, and its fake kernel -------------------------------------


def _call(_: int, digest: int, x: Tensor, weight: Tensor | None, *rest: Any) -> LinearCall | ElementwiseCall:
    """The call, from the arguments of the operator; without operands if it folds them.

    With `stored` it is that of the epilogue without the product.
    """
    first, second, others, number, options, out, stored = rest
    places, folds = [first, second, *(others or ())], options & _FOLDS
    every = (*EPILOGUES.values(), *LINKED.values())
    if stored is not None:  # a graph from another process may be the first to use one
        linear = [each for each in every if each.linear and not each.traced.stored]
        every = (*sorted(linear, key=lambda each: "with_product" not in vars(each)),)
    named = ((each if stored is None else each.with_product).name for each in every)
    epilogue = next(
        (each for each, name in zip(every, named, strict=True) if digest_of(name) == digest), None
    )
    if epilogue is None:
        raise RuntimeError(
            "epilogue: got the digest of one that this process has not made; accepted is one of a graph that was "
            "compiled here"
        )
    kinds = [] if folds else [each.kind for each in epilogue.operands]
    is_foldless = folds and epilogue is not SCALE_BATCH_NORM
    if is_foldless or any(each is not None for each in places[len(FOLDED) if folds else len(kinds) :]):
        raise checks.operands_that_do_not_fit(epilogue, places)
    pairs = zip(places, kinds, strict=False)
    operands = tuple([number if value is None and kind == SCALAR else value for value, kind in pairs])
    if weight is None:
        return ElementwiseCall(epilogue, x, operands, out)
    is_fp32 = x.dtype is torch.float32 and x.is_cuda
    precision = _precision.ORDERS[options & _ORDERS].name if is_fp32 else _precision.DEFAULT
    uses_pack, strict = bool(options & _USES_PACK), bool(options & _STRICT)
    return LinearCall(epilogue, x, weight, operands, precision, uses_pack, strict, out=out)


def _fold(call: LinearCall | ElementwiseCall, arguments: tuple[Any, ...]) -> FoldCall | None:
    """What the call's operands are folded from; all is checked then."""
    bias, scale, others, eps, options, _, _ = arguments[4:]
    if not options & _FOLDS:
        return None
    vectors, x = (bias, scale, *others), call.x
    if isinstance(call, LinearCall):
        checks.arguments(call._replace(epilogue=BIAS, operands=vectors[:1], strict=False))
        return checks.fold_batch_norm(x, vectors, eps, call.weight.shape[0])
    checks.rows_of_vectors(x)
    checks.arguments(call._replace(epilogue=BIAS, operands=(None,)))
    return checks.fold_batch_norm(x, vectors, eps, x.shape[-1])


def _run(*arguments: Any) -> None:
    call = _call(*arguments)
    if (stored := arguments[-1]) is not None:
        assert isinstance(call, LinearCall)
        result, product = nodes.linear_with_product(call._replace(out=None))
        arguments[-2].copy_(result)
        stored.copy_(product)
        return
    fold = _fold(call, arguments)
    if isinstance(call, LinearCall):
        nodes.forward(call) if fold is None else resolve.linear(call._replace(fold=fold))
        return
    if fold is not None:
        call = call._replace(operands=elementwise_kernels.fold_batch_norm(fold).unbind(0))
    resolve.elementwise(call)


def _cold(*arguments: Any) -> Tensor | None:
    """`_run`, but an error is returned as text, because exceptions do not reach the C++ code that calls it."""
    try:
        _run(*arguments)
    except Exception as error:  # any error becomes the operator's RuntimeError
        return torch.frombuffer(bytearray(str(error).encode() or b"error"), dtype=torch.uint8)
    return None


def _addmm_relu(bias: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """PyTorch's GEMM with bias and ReLU, for which C++ has no function."""
    _addmm_activation(bias, a, b, use_gelu=False, out=out)


def _fake(*arguments: Any) -> None:
    call = _call(*arguments)
    if _fold(call, arguments) is None:
        checks.arguments(call)


_LIBRARY = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]
_LIBRARY.impl("_cold", _cold, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("_addmm_relu", _addmm_relu, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("epigemm::_into", _fake, lib=_LIBRARY)
