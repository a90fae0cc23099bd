"""The entry: calls csrc/call by a C++ module that reads tensors without torch's dispatcher.

Each function returns the result, or the `Reason` why there is none. In the second case nothing was launched or written.
The reason is `NOT_PLAIN` if a tracer, a mode or a transform has to intercept the call, and `RECORDED` if only autograd
has to: `epigemm.route` handles these two. `epigemm.calls.resolve` handles the other reasons.

If the module does not load (`_native.no_entry`), PyTorch's operators compute every call.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from epigemm import _native
from epigemm._native import ops
from epigemm.arguments import autocast, checks, invariance
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall, Scaled, tensors_of
from epigemm.calls import by_reference, groups, weight_slices
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.epilogues.registry import Epilogue, Operands
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason

_FP32 = torch.float32
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks

NOT_PLAIN: Literal[Reason.NOT_PLAIN] = Reason.NOT_PLAIN
RECORDED: Literal[Reason.RECORDED] = Reason.RECORDED
RECORDED_BY_TORCH: Literal[Reason.RECORDED_BY_TORCH] = Reason.RECORDED_BY_TORCH
Recorded: TypeAlias = Literal[Reason.RECORDED, Reason.RECORDED_BY_TORCH]
_CIRCUMSTANCES = 11  # their place among the module's arguments
# Plain ints: to compare an IntEnum with what the module returns, or to make one, takes several times as long.
REASONS: tuple[Reason, ...] = (NOT_PLAIN, NOT_PLAIN, *Reason)
"""The reasons, by their numbers."""
_NOT_PLAIN, _NOT_READY, _RECORDED = int(NOT_PLAIN), int(Reason.NOT_READY), int(RECORDED)
_OTHER_SETTING, _BY_REFERENCE = int(Reason.OTHER_SETTING), int(Reason.BY_REFERENCE)
_RECORDED_BY_TORCH = int(RECORDED_BY_TORCH)


def mark_written(out: Tensor) -> None:
    """Increase the version counter of a tensor that a kernel writes without torch's knowledge."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def members() -> dict[str, Any]:
    """The functions and classes of torch that the module needs."""
    return {
        "Tensor": Tensor,
        "Parameter": Parameter,
        "dtype_type": torch.dtype,
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
        "mark_written": mark_written,
        # CPU builds of torch have no such functions, and no tensors for which they would be called.
        "get_device": getattr(torch._C, "_cuda_getDevice", None),
        "exchange_device": getattr(torch._C, "_cuda_exchangeDevice", None),
        "uint8": torch.uint8,
        "invariance": vars(invariance),
        "is_deterministic": torch._C._get_deterministic_algorithms,
        "is_inference": torch.is_inference_mode_enabled,
        "get_device_of": Tensor.get_device,
        "numel_of": Tensor.numel,
        "autocast_dtype": torch.get_autocast_dtype,
        "fp32_setting": _precision.read_setting,
        "fp32_of_cuda": (_precision.BACKENDS["cuda"], "matmul"),
        "fp32_callers": _precision.callers,
    }


_module: Any = _native.entry
if _module is not None:
    _exchange: Any = getattr(Tensor, "__dlpack_c_exchange_api__")  # noqa: B009  # torch's stubs lack it
    _module.init(_exchange, ops._call_functions(), members())


def sees(*tensors: Tensor | None) -> Reason | None:
    """The route of a call: None if it is plain, `RECORDED` if only autograd records it, else `NOT_PLAIN`."""
    if _module is None or is_traced():
        return NOT_PLAIN
    found = _module.sees(*tensors)
    if found == _NOT_PLAIN and current.log is not None:
        with current.log.closed():  # which hides nothing but the log's own mode
            found = _module.sees(*tensors)
    # In inference mode enable_grad turns on the flag that the entry asks for, yet nothing is recorded.
    if found == _RECORDED and _inference():
        return NOT_PLAIN
    return REASONS[found] if found else None


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    operands: Operands,  # one for each operand of the epilogue; empty if they are folded
    fold: Operands | None,  # what scale_batch_norm's are folded from: the vectors of `FOLDED`, then eps
    precision: str | None,  # what an fp32 product gets; None follows torch's setting
    out: Tensor | None,  # where the result goes; None: a new tensor
    strict: bool,  # the call must not run on torch's GEMM
    invariant: bool | None = None,  # the kernel must not depend on M; None: `epigemm.batch_invariant` decides
    uses_pack: bool = True,  # a kept pack of the weight, if it is current
    scaled: Scaled | None = None,  # of 8-bit numbers
    weight2: Tensor | None = None,  # this and the next two as of csrc/call/linear.h
    stored: Tensor | None = None,
    group_ends: Tensor | None = None,
    is_cast: bool = False,  # autocast casts none of the tensors, or has
) -> Tensor | Reason:
    """D = epilogue(x @ weight.T), or the reason. Arguments as of the public functions. Not under a compiler's trace."""
    if _module is None:
        return NOT_PLAIN
    if precision is not None and (type(precision) is not str or precision not in _precision.ARITHMETIC):
        return NOT_PLAIN
    if invariant is None:
        invariant = invariance.active and invariance.enabled()
    if invariant and getattr(weight, "ndim", 2) == 3:
        return NOT_PLAIN
    order, packs, eight_bits = _precision.ORDERS[0], None, None
    circumstances = dry_runs.CAST if is_cast else 0
    if scaled is not None:
        eight_bits = native(scaled)
        if eight_bits is None:
            return NOT_PLAIN
        order = _precision.OF_8_BITS[scaled[3]]
    elif getattr(x, "dtype", None) is _FP32:
        order = _precision.order(precision, "cuda" if x.is_cuda else "cpu")
        if order.overrides:
            circumstances |= dry_runs.OTHER_SETTING
        # A call whose weight needs a gradient uses no pack.
        if order.slices and x.is_cuda and not (_grad_enabled() and getattr(weight, "requires_grad", False)):
            if weight_slices.shortages:
                tensors = tensors_of((x, weight, *operands, *(fold or ()), out))
                return sees(*tensors) or Reason.NO_MEMORY  # as it may be again
            packs = weight_packs.buffers(weight) if uses_pack and weight_packs.owners else None
    # One display of a tuple, because to join several takes half as long as the call.
    # fmt: off
    call = (
        epilogue.number, x, weight, operands, fold, out, order.number, packs, 0, strict, invariant, circumstances,
        None, weight2, stored, None, None, eight_bits, group_ends,
    )
    # fmt: on
    found: Any = _module.linear(*call)
    if type(found) is not int:
        return found  # type: ignore[no-any-return]
    if found == _NOT_READY:
        if not plans.has_gpu_kernels(x):  # the question makes the device known
            return Reason.NOT_READY
        found = _module.linear(*call)
        if type(found) is not int:
            return found  # type: ignore[no-any-return]
    is_usual = scaled is None and weight2 is None and stored is None and group_ends is None
    if found == _BY_REFERENCE and out is not None and not out.is_contiguous():
        # The module has seen that `out` is apart from the others, but not whether it is apart from itself.
        checks.output_overlap(out, x, (), in_place=False)
    if found == _BY_REFERENCE and is_usual and weight.dim() == 2:
        return by_reference.linear_by_reference(epilogue, x, weight, operands, fold, out, order.overrides)
    if found == _BY_REFERENCE and weight2 is None and weight.dim() == 3:
        return groups.of_call(LinearCall(epilogue, x, weight, operands, out=out, group_ends=group_ends))
    if found == _NOT_PLAIN and current.log is not None:
        tensors = [each for each in (x, weight, *operands, *(fold or ()), out) if isinstance(each, Tensor)]
        with current.log.closed():  # a recorded call is not made here
            if _module.sees(*tensors) == _RECORDED:
                found = _module.linear(*call)
    if found in (_RECORDED, _RECORDED_BY_TORCH) and _inference():
        return NOT_PLAIN  # as in `sees`
    if found == _RECORDED_BY_TORCH:
        return RECORDED_BY_TORCH if is_usual and _may_torch_record(x, precision) else RECORDED
    if found == _OTHER_SETTING:  # torch's own setting would be less accurate than the call asks for
        with _precision.switched(x.device.type, _precision.IEEE):
            again = dry_runs.CAST if is_cast else 0
            found = _module.linear(*call[:_CIRCUMSTANCES], again, *call[_CIRCUMSTANCES + 1 :])
        if type(found) is not int:
            return found  # type: ignore[no-any-return]
    return REASONS[int(found)]


def ask(*arguments: Any) -> Any:
    """The module's `linear`, with its arguments (csrc/python/entry.cpp), for plain calls."""
    return _NOT_PLAIN if _module is None else _module.linear(*arguments)


def _may_torch_record(x: Tensor, precision: str | None) -> bool:
    """Whether PyTorch's own nodes may record a call.

    They may not if the call has its own `precision`, which has to hold in the backward pass, too. Nor if there are
    hooks on saved tensors: what is saved must not depend on a plan then, because a checkpoint compares what a forward
    pass and its repetition save.
    """
    return (precision is None or x.dtype is not _FP32) and _saved_tensor_hooks(True) is None


def products(
    rows: Tensor, x: Tensor | None, weight: Tensor | None, precision: str
) -> tuple[Tensor | None, Tensor | None]:
    """Both products of a backward pass, of matrices: rows @ weight and rows.T @ x.

    They skip what only a forward call needs: the weight's transpose and its pack. A result is None if the entry does
    not compute it, or if the weight or x is None. `precision` is that of the operator `epigemm::linear`.
    """
    if _module is None or is_traced():
        return None, None
    order = _precision.ORDERS[0]
    if rows.dtype is _FP32:
        order = _precision.order(precision, "cuda" if rows.is_cuda else "cpu")
        if order.slices and weight_slices.shortages:
            return None, None
    found = _module.products(rows, x, weight, order.number, dry_runs.OTHER_SETTING if order.overrides else 0)
    if type(found) is int:
        return None, None
    of_x, of_weight = found
    x_again = type(of_x) is int and of_x == _OTHER_SETTING
    weight_again = type(of_weight) is int and of_weight == _OTHER_SETTING
    if x_again or weight_again:
        asked = x if weight_again else None, weight if x_again else None
        with _precision.switched(rows.device.type, _precision.IEEE):
            again = _module.products(rows, *asked, order.number, 0)
        of_x, of_weight = again[0] if x_again else of_x, again[1] if weight_again else of_weight
    return None if type(of_x) is int else of_x, None if type(of_weight) is int else of_weight


def made(call: LinearCall | ElementwiseCall, stored: Tensor | None = None) -> Tensor | Reason:
    """`linear` or `elementwise`, with the arguments of a call, which autocast has cast."""
    if is_traced() or current.log is not None:
        return NOT_PLAIN
    if not isinstance(call, LinearCall):
        return elementwise(call.epilogue, call.x, tuple(call.operands), None, call.out)
    epilogue, x, weight, operands, precision, uses_pack, strict, invariant, out, weight2, *_ = call
    asked = None if precision == _precision.DEFAULT or call.eight_bits is not None else precision
    is_cast = autocast.is_any_on() and autocast.dtype_for(x) in (None, x.dtype)
    about = (asked, out, strict, invariant, uses_pack, call.eight_bits)
    more = (weight2, stored, call.group_ends, is_cast)
    return linear(epilogue, x, weight, tuple(operands), None, *about, *more)


def native(scaled: Scaled) -> tuple[Any, ...] | None:
    """What the module takes of 8 bits (csrc/python/entry.cpp); None of what no call may have."""
    x_scale, weight_scale, dtype, accumulate, out_scale = scaled
    dtype = torch.bfloat16 if dtype is None else dtype
    is_known = type(accumulate) is str and accumulate in _precision.OF_8_BITS
    if not is_known or type(dtype) is not torch.dtype or dtype not in dry_runs.ELEMENTS:
        return None
    return x_scale, weight_scale, out_scale, dtype, dry_runs.ELEMENTS[dtype]


def elementwise(
    epilogue: Epilogue,
    x: Tensor,
    operands: Operands,
    fold: Operands | None,
    out: Tensor | None,
    circumstances: int = dry_runs.CAST,
) -> Tensor | Reason:
    """D = epilogue(x), or the reason. Arguments as of `linear`. Not under a compiler's trace."""
    if _module is None:
        return NOT_PLAIN
    found: Any = _module.elementwise(epilogue.number, x, operands, fold, out, circumstances)
    if type(found) is not int:
        return found  # type: ignore[no-any-return]
    if found == _BY_REFERENCE:
        return by_reference.elementwise_by_reference(epilogue, x, operands, fold, out)
    if found == _RECORDED and _inference():
        return NOT_PLAIN
    return REASONS[found]


def derivative(call: ElementwiseCall, grad: Tensor, sums: Tensor | None = None) -> Tensor | Reason:
    """grad times the epilogue's derivative at x, or the reason.

    `sums`: on a GPU, contiguous `[N]` of x's dtype, receives the sums of the result's columns.
    """
    if _module is None or is_traced():
        return NOT_PLAIN
    found: Any = _module.derivative(
        call.epilogue.number, grad, call.x, tuple(call.operands), sums, dry_runs.CAST
    )
    return REASONS[found] if type(found) is int else found
