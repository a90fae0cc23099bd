"""Plain calls: straight to the kernels, by a module in C++ that sees tensors without torch's dispatcher.

`linear` and `elementwise` answer a call, or give None where somebody else has to: see `Reason`; `Reason.RECORDED` where
that is autograd and nobody else. Nothing is launched or written then. Decisions are made in csrc/call, by the planner.

The module needs the exchange API of `torch.Tensor`, which torch has from 2.10 on, and a CPython with the stable ABI,
which free-threaded ones lack. Elsewhere every call is somebody else's.
"""

from __future__ import annotations

import enum
import importlib
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from epigemm._native import ops
from epigemm.arguments import invariance
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import by_reference, execution, weight_slices
from epigemm.epilogues.registry import Epilogue
from epigemm.packs import keep_mode, weight_packs
from epigemm.planning import plans

_FP32 = torch.float32
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
Vectors = tuple[Tensor | float | None, ...]
_SPLIT_LATER = {
    code for code in _precision.FIRST_SLICES if _precision.SPLIT in _precision.road(code).fused[1:]
}
_PACK_USES = {weight_packs.KEEP: 0, weight_packs.FIND: 1, weight_packs.NONE: 2, None: 1}


class Reason(enum.IntEnum):
    """What stands in the way of a result, as the module returns it: csrc/call/torch.h tells what each one means."""

    NOT_PLAIN = 2
    DOES_NOT_FIT = 3
    IS_EMPTY = 4
    NOT_READY = 5
    MAY_OVERLAP = 6
    NOT_STORABLE = 7
    NOT_READABLE = 8
    LACKS_PACK = 9
    NO_MEMORY = 10
    NOT_FUSED = 11
    OTHER_SETTING = 12
    NOT_LINKED = 13
    RECORDED = 14
    BY_REFERENCE = 15
    RECORDED_BY_TORCH = 16


Recorded: TypeAlias = Literal[Reason.RECORDED, Reason.RECORDED_BY_TORCH]
RECORDED: Literal[Reason.RECORDED] = Reason.RECORDED
RECORDED_BY_TORCH: Literal[Reason.RECORDED_BY_TORCH] = Reason.RECORDED_BY_TORCH
# Of an IntEnum, comparing with what the module returns takes several times as long.
_RECORDED, _OTHER_SETTING = int(Reason.RECORDED), int(Reason.OTHER_SETTING)
_NOT_READY = int(Reason.NOT_READY)
_BY_REFERENCE, _RECORDED_BY_TORCH = int(Reason.BY_REFERENCE), int(Reason.RECORDED_BY_TORCH)


def members() -> dict[str, Any]:
    """What the module needs of torch."""
    return {
        "Tensor": Tensor,
        "Parameter": Parameter,
        "is_grad_enabled": torch.is_grad_enabled,
        "interpreter": torch._C._functorch.peek_interpreter_stack,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "has_function_mode": torch._C._is_torch_function_mode_enabled,
        "tracing_state": torch._C._get_tracing_state,
        "forward_ad": forward_ad,
        "any_autocast": torch._C._is_any_autocast_enabled,
        "is_profiling": torch._C._autograd._profiler_enabled,
        "empty": torch.empty,
        "empty_like": torch.empty_like,
        "linear": torch.nn.functional.linear,
        "mm": torch.mm,
        "addmm": torch.addmm,
        "addmm_activation": torch._addmm_activation,
        "addmm_activation_out": torch.ops.aten._addmm_activation.out,
        "unsafe_view": torch.ops.aten._unsafe_view.default,
        "mark_written": execution.mark_written,
        # CPU builds of torch have no such functions, and no tensors that they would be called for.
        "get_device": getattr(torch._C, "_cuda_getDevice", None),
        "exchange_device": getattr(torch._C, "_cuda_exchangeDevice", None),
        "uint8": torch.uint8,
    }


def _load() -> Any:
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None
    try:
        module = importlib.import_module("epigemm._entry")
        module.init(exchange, ops._call_functions(), members())
    except (
        ImportError
    ):  # built without Python's headers, a CPython without the stable ABI, another exchange API
        return None
    return module


_module = _load()


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Vectors,  # one for each of the epilogue's; empty where they are folded
    fold: Vectors
    | None,  # what scale_batch_norm's are folded from: the vectors of `epilogues.FOLDED` and then eps
    precision: str | None,  # what an fp32 product gets; None follows torch's setting
    out: Tensor | None,  # where the result goes; None: a new tensor
    pack_use: str | None,  # what may be done with the weight's pack; None: `epigemm.keep_packs` decides
    strict: bool,  # torch's GEMM is no answer
    invariant: bool | None = None,  # M must not choose the kernel; None: `epigemm.batch_invariant` decides
) -> Tensor | Recorded | None:
    """D = epilogue(x @ weight.T), or whose call it is. Arguments as public functions got them; nothing compiles."""
    if _module is None:
        return None
    if precision is not None and (type(precision) is not str or precision not in _precision.ARITHMETIC):
        return None
    if invariant is None:
        invariant = invariance.active and invariance.enabled()
    code, pack = 0, None
    if getattr(x, "dtype", None) is _FP32:
        code = _precision.code(precision, "cuda" if x.is_cuda else "cpu")
        if _grad_enabled() and getattr(weight, "requires_grad", False):
            pack_use = weight_packs.NONE  # the call is a recorded one
        elif code in _precision.FIRST_SLICES and x.is_cuda:
            slices = _slices_at_hand(weight, code, pack_use, invariant)
            if slices is None:
                return None
            pack, pack_use = slices
    call = (epilogue.number, x, weight, operands, fold, out)
    how = (pack, _PACK_USES[pack_use], strict, invariant)
    found: Tensor | int = _module.linear(*call, code, *how)
    if type(found) is not int:
        return found  # type: ignore[return-value]
    if found == _NOT_READY:
        if not plans.has_gpu_kernels(x):  # the question makes the device known
            return None
        found = _module.linear(*call, code, *how)
        if type(found) is not int:
            return found  # type: ignore[return-value]
    if found == _BY_REFERENCE:
        return by_reference.linear(epilogue, x, weight, operands, out, code & 1)
    if found in (_RECORDED, _RECORDED_BY_TORCH) and _inference():
        return None  # enable_grad there turns on the flag that the entry asks for, yet nothing is recorded
    if found == _RECORDED_BY_TORCH:
        return RECORDED_BY_TORCH if _may_torch_record(x, precision) else RECORDED
    if found != _OTHER_SETTING:
        return RECORDED if found == _RECORDED else None
    code &= ~1  # the last bit: torch's own setting would be less accurate than the call
    with _precision.full_fp32(x.device.type):
        found = _module.linear(*call, code, *how)
    return None if type(found) is int else found  # type: ignore[return-value]


def _may_torch_record(x: Tensor, precision: str | None) -> bool:
    """Whether PyTorch's own nodes are right for a recorded call.

    A `precision` of the call's own has to hold in its backward pass, too. And what hooks on saved tensors see must not
    depend on a plan: a checkpoint compares what a forward pass and its repetition save.
    """
    return (precision is None or x.dtype is not _FP32) and _saved_tensor_hooks(True) is None


def products(
    rows: Tensor, x: Tensor | None, weight: Tensor | None, precision: str
) -> tuple[Tensor | None, Tensor | None]:
    """Both products of a backward pass, of matrices: rows @ weight and rows.T @ x.

    They skip what only a forward call needs, the weight's transpose and its pack. None where there is no answer, and
    where the weight or x is None. A precision as the operator `epigemm::linear` has it.
    """
    code = _product_code(rows, precision)
    if code is None:
        return None, None
    found = _module.products(rows, x, weight, code)
    if type(found) is int:
        return None, None
    of_x, of_weight = found
    x_again = type(of_x) is int and of_x == _OTHER_SETTING
    weight_again = type(of_weight) is int and of_weight == _OTHER_SETTING
    if x_again or weight_again:
        asked = x if weight_again else None, weight if x_again else None
        with _precision.full_fp32(rows.device.type):
            again = _module.products(rows, *asked, code & ~1)
        of_x, of_weight = again[0] if x_again else of_x, again[1] if weight_again else of_weight
    return None if type(of_x) is int else of_x, None if type(of_weight) is int else of_weight


def _product_code(rows: Tensor, precision: str) -> int | None:
    """What fp32 products may run on; None where they are somebody else's."""
    if _module is None or _is_compiling():
        return None
    if rows.dtype is not _FP32:
        return 0
    code = _precision.code(precision, "cuda" if rows.is_cuda else "cpu")
    return None if code in _precision.FIRST_SLICES and weight_slices.has_been_short() else code


def _slices_at_hand(
    weight: Tensor, code: int, pack_use: str | None, is_invariant: bool = False
) -> tuple[Tensor | None, str] | None:
    """The weight's pack for the first arithmetic of a `precision.code`, and what the call may do with it.

    None where the call is somebody else's.
    """
    if weight_slices.has_been_short() or not isinstance(weight, Tensor):
        return None
    if pack_use is None:
        pack_use = keep_mode.pack_use(weight)
    if pack_use == weight_packs.NONE:
        return None, pack_use
    pack = weight_packs.find(weight, _precision.FIRST_SLICES[code])
    if pack is None:
        may_split_later = is_invariant or code in _SPLIT_LATER
        if may_split_later and weight_packs.find(weight, weight_packs.SLICES[_precision.SPLIT]) is not None:
            return None  # the call may come to that one
        # An inference tensor counts no versions: nothing is kept of it.
        changes_unseen = pack_use == weight_packs.KEEP and weight.is_inference()
        return None, weight_packs.FIND if changes_unseen else pack_use
    if not pack.is_current(weight) or weight_packs.capturing(weight.device):
        return None
    return pack.read(), pack_use


def linear_operator(call: LinearCall) -> Tensor | None:
    """`linear`, for a call whose operands are as the operator `epigemm::linear` has them."""
    found = _linear_operator(call)
    return found if isinstance(found, Tensor) else None


def run_linear(call: LinearCall) -> Tensor:
    """The operator `epigemm::linear` where nothing traces or differentiates it: here, or by the cold path."""
    found = linear_operator(call)
    return execution.linear(call) if found is None else found


def is_left_to_torch(call: LinearCall) -> bool:
    """Whether PyTorch's own operators record a call, some tensor of which requires a gradient."""
    return _linear_operator(call) is RECORDED_BY_TORCH


def _linear_operator(call: LinearCall) -> Tensor | Recorded | None:
    epilogue, x, weight, bias, operands, scalars, precision, pack_use, strict, invariant, out = call
    given = epilogue.in_order(bias, operands, scalars)
    if given is None or _is_compiling():
        return None
    asked = None if precision == _precision.DEFAULT else precision
    return linear(epilogue, x, weight, given, None, asked, out, pack_use, strict, invariant)


def elementwise(
    epilogue: Epilogue, x: Tensor, operands: Vectors, fold: Vectors | None, out: Tensor | None
) -> Tensor | Recorded | None:
    """D = epilogue(x), or whose the call is. Arguments as of `linear`; nothing compiles."""
    if _module is None:
        return None
    found: Tensor | int = _module.elementwise(epilogue.number, x, operands, fold, out)
    if type(found) is not int:
        return found  # type: ignore[return-value]
    if found == _BY_REFERENCE:
        return by_reference.elementwise_by_reference(epilogue, x, operands, out)
    return RECORDED if found == _RECORDED and not _inference() else None


def elementwise_operator(call: ElementwiseCall) -> Tensor | None:
    """`elementwise`, for a call whose operands are as the operator `epigemm::elementwise` has them."""
    epilogue, x, bias, operands, scalars, out = call
    given = epilogue.in_order(bias, operands, scalars)
    if given is None or _is_compiling():
        return None
    found = elementwise(epilogue, x, given, None, out)
    return found if isinstance(found, Tensor) else None


def derivative(call: ElementwiseCall, grad: Tensor) -> Tensor | None:
    """grad times the epilogue's derivative at x, or None; operands as `elementwise_operator` has them."""
    given = call.epilogue.in_order(call.bias, call.operands, call.scalars)
    if given is None or _module is None or _is_compiling():
        return None
    found: Tensor | int = _module.derivative(call.epilogue.number, grad, call.x, given)
    return None if type(found) is int else found  # type: ignore[return-value]
