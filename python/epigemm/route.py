"""Sends each call of the public functions to one of three routes.

- Plain: the entry makes the call in C++ (`epigemm.calls.entry`). Where it returns a reason, `epigemm.calls.resolve`
  does what is needed, and makes the call again.
- Recorded: autograd records the call, and nothing else intercepts it. The call becomes a node of `epigemm.autograd`, or
  for small layers PyTorch's own nodes.
- Operator: a tracer, a mode, a transform or a tensor subclass intercepts the call. The operators `torch.ops.epigemm.*`
  work with all of these, but take the host longer.

The entry says which route a call takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments import autocast, checks, eight_bits, forms, invariance
from epigemm.arguments.calls import (
    AS_USUAL,
    BLOCKS,
    UNSCALED,
    EightBits,
    ElementwiseCall,
    FoldCall,
    LinearCall,
    Options,
    Scaled,
    Vectors,
    blocks_of,
    is_scaled,
    operand_dtype,
    operator_arguments,
    tensors_of,
)
from epigemm.arguments.forms import Function
from epigemm.arguments.precision import DEFAULT, PROMOTED
from epigemm.autograd import group_products, nodes
from epigemm.calls import by_reference, elementwise_kernels, entry, invariant, resolve
from epigemm.calls import groups as by_groups
from epigemm.calls.log import current
from epigemm.compilers import in_functional_derivative, is_exporting, is_traced
from epigemm.epilogues.declaration import Traced, TracedResults
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.registry import FOLDED, Epilogue, Operands, folded_by_reference
from epigemm.operators import graphs, groups
from epigemm.operators import registration as _registration  # noqa: F401
from epigemm.packs.weight_packs import PackedWeight
from epigemm.planner.reasons import Reason

# Looked up once, because a plain call takes the host only microseconds.
_may_be_exporting = torch.compiler.is_exporting  # of any thread
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_any_autocast = autocast.is_any_on

_NO_NORM = (None,) * 4  # for the vectors of BatchNorm among those of `FOLDED`
_BEFORE_OUT = 7  # arguments of the operators that write into a tensor
_PLAIN, _RECORDED, _OPERATOR = None, entry.RECORDED, entry.NOT_PLAIN
"""The routes of a call, as the entry names them."""


def linear(
    function: Function,
    x: Tensor,
    weight: Tensor | PackedWeight,
    operands: Operands,  # one for each of the function's, as callers give them; none with a `fold`
    out: Tensor | None = None,  # where the result goes
    precision: str | None = None,  # this and the next two are `Options`
    strict: bool = False,
    scaled: Scaled = UNSCALED,
    fold: tuple[Any, ...] | None = None,  # of scale_batch_norm, the vectors of `FOLDED` and then eps
    *,
    promotes: bool = True,  # whether under autocast the operands' types count, as in PyTorch
    offs: Tensor | None = None,  # the ends of groups of rows, each with a weight of its own
) -> Tensor:
    """D = function(x @ weight.T, operands...)."""
    x_scale, weight_scale, dtype, accumulate, memory = scaled
    is_any = x_scale is not None or weight_scale is not None or dtype is not None or memory is not None
    is_8_bits = is_any or accumulate != PROMOTED
    if is_8_bits:  # these have no gradients, and autocast does not cast them
        dtype = operand_dtype(EightBits(*scaled)) or eight_bits.RESULTS[0]
    elif isinstance(function, Traced) and function.ends:
        operands = _unrecorded(function, operands)
        if 0 in function.ends:
            x, weight = _detached(x), _detached(weight)
    if isinstance(weight, PackedWeight):
        if offs is not None:
            raise TypeError(
                "weight: got a PackedWeight; accepted with offs is a tensor with a matrix for each group"
            )
        weight = weight.weight
    if precision is not None and getattr(weight, "ndim", 2) == 3:
        raise RuntimeError(
            f"precision: got {precision!r} with a weight of a matrix for each of x's; accepted there is None"
        )
    is_under_autocast = _any_autocast() and not is_8_bits
    may_promote = is_under_autocast and promotes and offs is None and getattr(weight, "ndim", 2) != 3
    if may_promote and isinstance(function, Traced):
        typing = [operands[place] for place in function.typing]
        if autocast.promotes(x, typing):
            if out is not None:
                checks.own_memory(out, x, [("weight", weight), *forms.by_name(function, operands)])
            z, operands = promoted(function, x, weight, operands, Options(precision, strict))
            return elementwise(function, z, operands, out)
    found: Tensor | Reason | None = None
    if is_under_autocast:
        if out is not None:
            others = [("weight", weight), *forms.by_name(function, operands), *_named(fold).items()]
            checks.own_memory(out, x, others)
        x, weight, operands, fold = autocast.cast_call(function.bias_place, x, weight, operands, fold)
    if is_traced():
        operands = forms.without_symbols(function, operands, x)
        found = _OPERATOR
        # Others are checked below: the operator would name an operand as the package's epilogue does.
        is_native = not is_8_bits and function.is_compiled and offs is None
        if is_native and (not function.is_choice or _are_like(x, operands)):
            epilogue, given = forms.seen(function, x, operands)
            found = graphs.native(epilogue, x, weight, given, fold, out, precision, strict)
    elif not is_8_bits or (fold is None and blocks_of(memory) is None):
        given_scales: Scaled | None = None
        if is_8_bits:
            memory = eight_bits.memory_of_blocks(memory, x, weight)
            given_scales = (*scaled[:-1], memory)
        epilogue, given = (
            (function, operands)
            if isinstance(function, Epilogue)
            else forms.seen(function, x, operands, dtype)
        )
        # fmt: off
        found = entry.linear(
            epilogue, x, weight, given, fold, precision, out, strict, None, True, given_scales, None, None, offs,
            is_under_autocast,
        )
        # fmt: on
    if isinstance(found, Tensor):
        return eight_bits.with_blocks(found, memory) if is_8_bits else found
    if current.log is not None:
        current.log.begin()
    if found is entry.RECORDED_BY_TORCH:
        return nodes.linear_by_torch(epilogue, x, weight, *operands)
    is_recorded = found is _RECORDED and out is None and fold is None and offs is None and not is_8_bits
    if is_recorded and epilogue is function and not epilogue.has_scalar and weight.dim() == 2:
        # The entry has looked at all that is checked below.
        is_invariant = invariance.active and invariance.enabled()
        about = (DEFAULT if precision is None else precision, not weight.requires_grad, strict, is_invariant)
        return nodes.record(LinearCall(epilogue, x, weight, operands, *about))
    ends = {} if offs is None else {"offs": offs}
    scales = {"x_scale": x_scale, "weight_scale": weight_scale, "out_scale": scaled[-1]}
    more: dict[str, Any] = scales if is_8_bits else ends
    by_name: list[tuple[str, Any]] = []
    if out is not None or is_8_bits:
        operands_by_name = forms.by_name(function, operands)
        by_name = [("weight", weight), *more.items(), *operands_by_name, *_named(fold).items()]
        checks.own_memory(out, x, by_name)
    if found is None or found is _OPERATOR:
        _check_tensors(function, operands, fold, out, x=x, weight=weight, **ends)
    of_types = None
    if is_8_bits:
        of_types = eight_bits.checked(x, weight, scaled)
        dtype, precision = operand_dtype(of_types), None
        function, operands = _of_eight_bits(function, x, weight, operands, fold, dtype, by_name)
        fold = None
    if isinstance(function, Epilogue) and not function.has_scalar:
        epilogue = function
    else:
        epilogue, operands = forms.converted(function, x, operands, dtype=dtype)
    route = _route_of(found, x, weight, *operands, *(fold or ()), *more.values(), out)
    options = _options(route, x, weight, precision, strict)
    if fold is None:
        call = LinearCall(epilogue, x, weight, operands, *options, out, eight_bits=of_types, group_ends=offs)
        return _made(route, call) if of_types is None else _made_of_eight_bits(route, call, of_types)
    # All launches are checked before the first one.
    checks.arguments(LinearCall(BIAS, x, weight, fold[:1], *options, out))
    folded = checks.fold_batch_norm(x, fold[:-1], fold[-1], weight.shape[0])
    if route is _PLAIN:
        return resolve.linear(LinearCall(SCALE_BATCH_NORM, x, weight, (), *options, out, fold=folded))
    if fold[0] is not None and not strict and adds_bias_first(x):
        product = linear(BIAS, x, weight, fold[:1], None, precision)
        operands = _fold(route, folded._replace(vectors=(None, *folded.vectors[1:])), out)
        return _made(route, ElementwiseCall(SCALE_BATCH_NORM, product, operands, out))
    operands = _fold(route, folded, out)
    return _made(route, LinearCall(SCALE_BATCH_NORM, x, weight, operands, *options, out))


def _of_eight_bits(
    function: Function,
    x: Tensor,
    weight: Tensor,
    operands: Operands,
    fold: tuple[Any, ...] | None,
    dtype: torch.dtype,
    by_name: Sequence[tuple[str, Any]],
) -> tuple[Function, Operands]:
    """What follows a product of 8-bit numbers, which have no gradient: the fold is made, operands have this type."""
    eight_bits.refuse_gradients([("x", x), *by_name])
    if in_functional_derivative():
        raise RuntimeError(
            "x: got 8 bits under a derivative of torch.func; accepted there are types with gradients"
        )
    if fold is not None:
        like = x.new_empty(0, dtype=dtype)
        folded = checks.fold_batch_norm(like, fold[:-1], fold[-1], weight.shape[0])
        operands = _fold(entry.sees(*tensors_of((x, *fold))), folded, None)
    # A traced function has forms for fp32 operands; built-ins take operands of the result's type alone.
    is_wide = any(each.dtype is torch.float32 is not dtype for each in tensors_of(operands))
    return function.traced if is_wide and isinstance(function, Epilogue) else function, operands


def _are_like(x: Tensor, operands: Operands) -> bool:
    """Whether all operands that there are have x's type."""
    return all(each is None or (isinstance(each, Tensor) and each.dtype == x.dtype) for each in operands)


def promoted(
    declared: Traced | TracedResults, x: Tensor, weight: Tensor, operands: Operands, options: Options
) -> tuple[Tensor, Operands]:
    """A call whose result autocast makes fp32 (`autocast.promotes`): the product, and the operands of what follows.

    The product and its bias are rounded to autocast's type, as in PyTorch, and then fp32 as all operands are. All
    are checked before it is launched.
    """
    checks.tensors(x=x, weight=weight)
    autocast.refuse_strict(options.strict)
    place = declared.bias_place - 1
    bias: Any = operands[place] if place >= 0 else None
    like, like_weight, (like_bias,) = autocast.cast(x, weight, bias)
    checks.product(like, like_weight)
    shape, values = (*x.shape[:-1], weight.shape[0]), []
    for number, (spec, value) in enumerate(zip(declared.operands, operands, strict=True)):
        is_bias = number == place
        if value is not None or not is_bias:
            checks.operand(spec.kind, spec.name, like_bias if is_bias else value, like, shape)
        if is_bias and isinstance(value, Tensor):  # -0 changes no sum
            value = torch.full_like(value, -0.0, dtype=torch.float32, requires_grad=False)
        values.append(value.to(torch.float32) if isinstance(value, Tensor) and spec.kind != SCALAR else value)
    z = linear(BIAS, like, like_weight, (like_bias,), None, *options)
    return z.to(torch.float32), values


def linear_folded(
    x: Tensor,
    weight: Tensor | PackedWeight,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    out: Tensor | None = None,
    options: Options = AS_USUAL,
) -> Tensor:
    """D = multiplier * (x @ weight.T) + offset, both folded from `vectors` (those of `FOLDED`)."""
    if isinstance(weight, PackedWeight):
        weight = weight.weight
    if getattr(weight, "ndim", 2) == 3:  # some ways below make no fold, and would take it
        checks.tensors(x=x, weight=weight)
        checks.shapes(x, weight)
    bias, *others = vectors
    scale, mean, var, gain, shift = others
    if scale is None and mean is None and var is None and gain is None and shift is None:
        return linear(BIAS, x, weight, (bias,), out, *options)
    if _any_autocast() and not is_scaled(options.scaled) and autocast.promotes(x, (scale,)):
        # As in PyTorch: the product has autocast's type, and what it is multiplied by makes the result fp32.
        autocast.refuse_strict(options.strict)
        checks.own_memory(out, x, [("weight", weight), *_named(vectors).items()])
        checks.tensors(x=x, weight=weight)
        checks.optional_tensors(**_named(vectors))
        like, weight, (first,) = autocast.cast(x, weight, bias)
        checks.arguments(LinearCall(BIAS, like, weight, (first,)))
        checks.fold_batch_norm(like, (first, *others), eps, weight.shape[0])
        product = linear(BIAS, like, weight, (first,), None, *options).to(torch.float32)
        wide = (None, *(None if each is None else each.to(torch.float32) for each in others), eps)
        return elementwise(SCALE_BATCH_NORM, product, (), out, wide)
    if not checks.is_folded(var, eps):
        if options.scaled[-1] is not None:
            raise RuntimeError(
                "out_scale: got one with an eps that rounds to 0, where PyTorch's batch_norm computes the result; "
                "accepted there is None"
            )
        if options.strict:
            raise RuntimeError(
                "strict: got True with an eps that rounds to 0, where no fused kernel runs; accepted there is False"
            )
        checks.own_memory(out, x, [("weight", weight), *_named(vectors).items()])
        scaled = linear_folded(x, weight, (*vectors[:2], *_NO_NORM), 0.0, None, options)
        return by_reference.unfolded(scaled, vectors[2:], eps, out)
    return linear(SCALE_BATCH_NORM, x, weight, (), out, *options, fold=(*vectors, eps))


def adds_bias_first(x: Tensor) -> bool:
    """Whether a bias is not folded, but added to the product, as in PyTorch: before that is rounded to 16 bits.

    And on CPUs, where a fold of it gains nothing, and an infinite scale of both would be inf - inf. Not for
    batch-invariant calls there, which are computed row by row, with the fold.
    """
    if x.element_size() == 1:
        return False
    return x.element_size() == 2 or (x.is_cpu and not (invariance.active and invariance.enabled()))


def _options(
    route: Reason | None, x: Tensor, weight: Tensor, precision: str | None, strict: bool
) -> tuple[str, bool, bool, bool]:
    """The checked options of a call: precision, whether it uses a pack, strict, and whether it is batch-invariant."""
    asked = DEFAULT if precision is None else checks.precision(precision)
    if is_traced() or (_may_be_exporting() and is_exporting()):
        asked = graphs.resolved(asked, x)
    if strict is not False:
        checks.flag("strict", strict)
    is_trained = route is _RECORDED and weight.requires_grad
    return asked, not is_trained, strict, invariance.active and invariance.enabled()


def _made(route: Reason | None, call: LinearCall | ElementwiseCall) -> Tensor:
    """A call that the entry has not made, by its route."""
    is_linear = isinstance(call, LinearCall)
    if isinstance(call, LinearCall) and (call.group_ends is not None or call.weight.dim() == 3):
        by_groups.check(call)
        if route is _PLAIN:
            return resolve.linear(by_groups.readable(call))
        by_groups.refuse(call)
        found = groups.in_graph(call)
        return by_groups.reference(call, group_products.STEPS) if found is None else found
    if isinstance(call, LinearCall) and call.invariant and call.x.device.type == "meta":
        invariant.refuse(call)
    if route is _RECORDED and call.out is None:
        return nodes.record(call)
    if route is _PLAIN:
        return resolve.linear(call) if isinstance(call, LinearCall) else resolve.elementwise(call)
    if in_functional_derivative():
        return by_reference.in_derivative(call)
    if route is _OPERATOR and call.epilogue.is_choice:
        checks.arguments(call)  # the operator would name an operand as the package's epilogue does
    arguments = operator_arguments(call)
    if call.out is None:
        result: Tensor = (ops.linear if is_linear else ops.elementwise)(*arguments)
        return result
    checks.not_negated(call.out)
    into = ops.linear_out if is_linear else ops.elementwise_out
    into(*arguments[:_BEFORE_OUT], call.out, *arguments[_BEFORE_OUT:])
    return call.out


def _made_of_eight_bits(route: Reason | None, call: LinearCall, about: EightBits) -> Tensor:
    """The same of 8-bit numbers; a result in blocks comes with their scales."""
    x, out, out_scale = call.x, call.out, about.out_scale
    if route is _PLAIN:
        out_scale = eight_bits.memory_of_blocks(out_scale, x, call.weight)
    elif isinstance(out_scale, float):
        out_scale = torch.full((), out_scale, dtype=torch.float32, device=x.device)
    call = call._replace(eight_bits=about._replace(out_scale=out_scale))
    if out_scale is not BLOCKS:
        return eight_bits.with_blocks(_made(route, call), out_scale)
    checks.arguments(call)
    result, blocks = ops.linear_in_blocks(*operator_arguments(call)[:-2])
    return eight_bits.with_blocks(result if out is None else out.copy_(result), blocks)


def elementwise(
    function: Function,
    x: Tensor,
    operands: Operands,
    out: Tensor | None = None,
    fold: tuple[Any, ...] | None = None,
) -> Tensor:
    """D = function(x, operands...), arguments as of `linear`."""
    found: Tensor | Reason
    if isinstance(function, Traced) and function.ends:
        operands = _unrecorded(function, operands)
        x = _detached(x) if 0 in function.ends else x
    if fold is not None and not checks.is_folded(fold[3], fold[-1]):
        checks.own_memory(out, x, _named(fold).items(), in_place=True)
        vectors = (*fold[:2], *_NO_NORM, 0.0)
        z = x if fold[1] is None else elementwise(SCALE_BATCH_NORM, x, (), None, vectors)
        return by_reference.unfolded(z, fold[2:-1], fold[-1], out)
    if is_traced():
        operands = forms.without_symbols(function, operands, x)
        found = _OPERATOR
        if isinstance(function, Epilogue):
            found = graphs.native(function, x, None, operands, fold, out)
    else:
        epilogue, given = (
            (function, operands) if isinstance(function, Epilogue) else forms.seen(function, x, operands)
        )
        found = entry.elementwise(epilogue, x, given, fold, out)
    if isinstance(found, Tensor):
        return found
    if current.log is not None:
        current.log.begin()
    first = "z" if function.is_choice else "x"
    if found is _OPERATOR:
        _check_tensors(function, operands, fold, out, **{first: x})
    if isinstance(function, Epilogue) and not function.has_scalar:
        epilogue = function
    else:
        epilogue, operands = forms.converted(function, x, operands, first)
    route = _route_of(found, x, *operands, *(fold or ()), out)
    if fold is not None:
        checks.rows_of_vectors(x)
        checks.arguments(ElementwiseCall(BIAS, x, out=out))
        folded = checks.fold_batch_norm(x, fold[:-1], fold[-1], x.shape[-1])
        if out is not None:
            checks.own_memory(out, x, _named(fold).items(), in_place=True)
        operands = _fold(route, folded, out)
    return _made(route, ElementwiseCall(epilogue, x, operands, out))


def fold(like: Tensor, vectors: Vectors, eps: float, columns: int) -> tuple[Tensor, ...]:
    """Multiplier and offset that `vectors` (those of `FOLDED`) fold into, in the epilogue's arithmetic."""
    folded = checks.fold_batch_norm(like, vectors, eps, columns)
    return _fold(entry.sees(like, *vectors), folded, None)


def _named(vectors: Sequence[Any] | None) -> dict[str, Any]:
    """The vectors that are folded, by name, without the eps that may follow them."""
    return {} if vectors is None else dict(zip(FOLDED, vectors, strict=False))


def _fold(route: Reason | None, call: FoldCall, out: Tensor | None) -> tuple[Tensor, ...]:
    """Multiplier and offset, by the same route as the call that reads them."""
    if route is _RECORDED and out is None and any(v is not None and v.requires_grad for v in call.vectors):
        return nodes.fold_batch_norm(call)
    if route is _PLAIN or (route is _RECORDED and out is None):
        return elementwise_kernels.fold_batch_norm(call).unbind(0)
    like, _, vectors, eps = call
    if in_functional_derivative():
        return folded_by_reference(like, vectors, eps)
    # The fold reads the dtype and the device of x alone. If x kept its gradient, autograd would record the fold as a
    # function of x, and the layer's derivative would be made for operands that need a gradient.
    like = _detached(like)
    folded: Tensor = ops.fold_batch_norm(like, *vectors, eps)
    return folded.unbind(0)


def _detached(value: Any) -> Any:
    """A tensor without its gradient; what has none itself. Under `vmap` a tensor does not tell whether it has one."""
    if not isinstance(value, Tensor):
        return value
    may_be_recorded = value.requires_grad or (not is_traced() and _functorch_interpreter() is not None)
    return value.detach() if may_be_recorded else value


def _unrecorded(function: Traced, operands: Operands) -> Operands:
    """The operands, detached if their gradient ends inside the function."""
    numbered = enumerate(operands, 1)
    return tuple([_detached(value) if number in function.ends else value for number, value in numbered])


def _check_tensors(
    function: Function, operands: Operands, fold: tuple[Any, ...] | None, out: object, **required: object
) -> None:
    """TypeError unless a call's arguments are tensors. Other operands than a bias are checked as they are converted."""
    vectors = _named(fold)
    checks.tensors(**required)
    if fold is None and isinstance(function, Epilogue) and function.bias_place:
        vectors = {"bias": operands[0]}
    checks.optional_tensors(**vectors, out=out)


def _route_of(found: Reason | None, *arguments: Any) -> Reason | None:
    """The route of a call. `found`: what the entry has returned for it, or None if it was not asked."""
    if found is None or found is _OPERATOR:
        # The entry may have refused an argument that was converted to a tensor or a number since.
        return entry.sees(*tensors_of(arguments))
    return _RECORDED if found is entry.RECORDED or found is entry.RECORDED_BY_TORCH else _PLAIN
