"""Registers the operators' implementation, fake kernels, derivatives, vmap rules and flops with torch.

The schemas come from the C++ module. With these registrations `torch.ops.epigemm.*` work when they are called directly,
under autograd, `torch.compile` and `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from epigemm._native import ops
from epigemm.arguments import checks, eight_bits
from epigemm.arguments.calls import (
    BLOCKS,
    EightBits,
    ElementwiseCall,
    LinearCall,
    operator_arguments,
)
from epigemm.arguments.precision import DEFAULT, PROMOTED
from epigemm.autograd import gradient_products, gradients, nodes
from epigemm.calls import elementwise_kernels, entry, resolve
from epigemm.calls.log import current
from epigemm.compilers import decompose_in_inductor, when_imported
from epigemm.epilogues.registry import Epilogue, Operands, compute_dtype
from epigemm.operators import graphs, vmap
from epigemm.planner.reasons import Reason

# --- arguments -> calls ----------------------------------------------------------------------------------------------


def linear_call(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor] | None,
    scalars: Sequence[float] | None,
    precision: str,
    uses_pack: bool = True,
    strict: bool = False,
    invariant: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | str | None = None,
) -> LinearCall:
    """The arguments of `epigemm::linear`; AOTInductor's packages pass None for empty lists."""
    spec = checks.epilogue_named(epilogue, linear=True)
    given = _in_order(spec, bias, operands, scalars)
    call = LinearCall(spec, x, weight, given, precision, uses_pack, strict, invariant)
    if x_scale is None and weight_scale is None and out_dtype is None and out_scale is None:
        return call
    accumulate = PROMOTED if precision == DEFAULT else precision
    asked = EightBits(x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return call._replace(eight_bits=eight_bits.checked(x, weight, asked))


def linear_in_blocks_call(*arguments: Any) -> LinearCall:
    """The arguments of `epigemm::linear_in_blocks`."""
    call = linear_call(*(*arguments, eight_bits.E4M3, BLOCKS))
    memory = eight_bits.memory_of_blocks(BLOCKS, call.x, call.weight)
    return call._replace(eight_bits=call.eight_bits._replace(out_scale=memory))  # type: ignore[union-attr]


def linear_out_call(*arguments: Any) -> LinearCall:
    """The arguments of `epigemm::linear_out`."""
    *head, out = arguments[:8]
    call = linear_call(*head, *arguments[8:])
    return call._replace(out=out)


def elementwise_call(
    epilogue: str,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor] | None,
    scalars: Sequence[float] | None,
    out: Tensor | None = None,
) -> ElementwiseCall:
    """The arguments of `epigemm::elementwise` and `elementwise_out`."""
    spec = checks.epilogue_named(epilogue, linear=False)
    return ElementwiseCall(spec, x, _in_order(spec, bias, operands, scalars), out)


def _in_order(
    spec: Epilogue, bias: Tensor | None, tensors: Sequence[Tensor] | None, scalars: Sequence[float] | None
) -> Operands:
    if bias is not None and not spec.bias_place:
        raise RuntimeError(f"bias: got a tensor; the epilogue {spec.name!r} accepts None")
    given = spec.in_order(bias, tensors or (), scalars or ())
    if given is None:
        raise checks.operands_that_do_not_fit(spec, (bias, *(tensors or ()), *(scalars or ())))
    return given


# --- the operators ---------------------------------------------------------------------------------------------------


class _Operator(NamedTuple):
    """The parts of an operator."""

    call: Callable[..., Any]  # makes one object of its arguments
    fake: Callable[[Any], Any]  # the shape of its result, after a check of the arguments
    implementation: Callable[[Any], Any]  # below autograd
    plain: Callable[[Any], Tensor | Reason]  # makes the call if it is plain, else returns the reason
    # with a node in autograd's graph, for plain tensors that nothing traces
    recorded: Callable[[Any], Any]
    save: Callable[[Any, Any, Any], Any]  # saves what the derivative needs, for all others
    backward: Callable[..., tuple[Any, ...]]  # the derivative, for all others


def _checked_out(call: LinearCall | ElementwiseCall) -> Tensor:
    checks.arguments(call)
    return call.new_out()


def _in_blocks(run: Callable[[LinearCall], Tensor]) -> Callable[[LinearCall], tuple[Tensor, Any]]:
    """A kernel of `linear_in_blocks`: the result, and the memory with its scales."""
    return lambda call: (run(call), call.eight_bits.out_scale)  # type: ignore[union-attr]


def _of_changing_weight(call: LinearCall) -> LinearCall:
    """The call, without a pack if a gradient of its weight is needed.

    Such a weight is about to change, and its pack must not be used after a change that is not noticed. So the operator
    makes the pack stale.
    """
    return call._replace(uses_pack=False) if call.weight.requires_grad else call


_OPERATORS = {
    "linear": _Operator(
        linear_call,
        _checked_out,
        nodes.forward,
        lambda call: entry.made(call) if call.uses_pack and not call.invariant else Reason.NOT_PLAIN,
        lambda call: nodes.record(_of_changing_weight(call)),
        gradients.save,
        gradients.backward,
    ),
    # What `linear` becomes where autograd records a traced call, which was checked: nobody else calls it.
    "linear_with_product": _Operator(
        linear_call,
        lambda call: (_checked_out(call), call.new_out()),
        nodes.linear_with_product,
        lambda call: Reason.NOT_PLAIN,  # only recorded calls keep their product
        lambda call: nodes.recorded_with_product(
            _of_changing_weight(call), call.x, call.weight, *call.operands
        ),
        gradients.save,
        gradients.backward,
    ),
    "elementwise": _Operator(
        elementwise_call,
        _checked_out,
        resolve.run,
        entry.made,
        nodes.record,
        gradients.save,
        gradients.backward,
    ),
    "fold_batch_norm": _Operator(
        lambda like, *rest: checks.fold_batch_norm(like, rest[:-1], rest[-1], None),
        lambda call: call.like.new_empty((2, call.columns), dtype=compute_dtype(call.like.dtype)),
        elementwise_kernels.fold_batch_norm,
        lambda call: Reason.NOT_PLAIN,  # the entry computes folds only as part of other calls
        lambda call: torch.stack(nodes.fold_batch_norm(call)),
        gradients.save_fold_batch_norm,
        gradients.fold_batch_norm_backward,
    ),
}


class _Library(torch.library.Library):
    """torch's Library, but with autograd kernels that look at the arguments before they run the operator."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """As torch's. `register_autograd` calls it with the autograd kernel that it has made."""
        if dispatch_key == "Autograd" and op_name in _OPERATORS:
            fn = _at_once(op_name, _traced_linear(fn) if op_name == "linear" else fn)
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


def _at_once(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, an autograd kernel, without the rest of the dispatcher if nothing traces the call.

    The dispatcher takes the host longer than the launch, and compiled graphs make every call through it. It would
    refuse the calls of AOTInductor's packages, which pass None for empty lists.
    """
    operator = _OPERATORS[name]

    def autograd_kernel(keyset: Any, *args: Any) -> Any:
        call = operator.call(*args)
        found = operator.plain(call)
        if isinstance(found, Tensor):
            return found
        inputs = _tensors_in(args)
        if current.log is not None:
            current.log.begin(call if name == "linear_with_product" else None)
        if not gradient_products.runs_directly(*inputs):
            return kernel(keyset, *args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return operator.recorded(call)
        return operator.implementation(call)

    return autograd_kernel


def _traced_linear(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`kernel`, the autograd kernel of `linear`: `linear_with_product` where `gradients.keeps_product`.

    For traced calls only this kernel can tell whether a gradient is needed. Kernels below autograd cannot.
    """

    def autograd_kernel(keyset: Any, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return kernel(keyset, *args)
        call = _of_changing_weight(linear_call(*args))
        recorded = any(tensor.requires_grad for tensor in call.inputs)
        if not recorded or not gradients.keeps_product(call):
            return kernel(keyset, *args[:7], *operator_arguments(call)[7:])
        # Checked before anything is launched: the two kernels' own checks would not fit the call as a whole.
        checks.arguments(call)
        result, _ = ops.linear_with_product(*operator_arguments(call))
        return result  # type: ignore[no-any-return]

    return autograd_kernel


def _refuse_gradients(op: Any) -> Callable[..., None]:
    """The autograd kernel of an operator that writes into `out`."""

    def autograd_kernel(keyset: Any, *args: Any) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors_in(args)):
            raise RuntimeError(
                f"{op._opname}(): functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad."
            )
        with torch._C._AutoDispatchBelowAutograd():
            op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return autograd_kernel


def _bump_version(op: Any) -> Callable[..., None]:
    """The ADInplaceOrView kernel: a backward pass for which `out` was saved must notice that it was written."""
    out = [argument.name for argument in op._schema.arguments].index("out")

    def adinplaceorview(keyset: Any, *args: Any) -> None:
        entry.mark_written(args[out])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return adinplaceorview


def _tensors_in(args: Sequence[Any]) -> list[Tensor]:
    flat = [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [leaf for leaf in flat if isinstance(leaf, Tensor)]


_LIBRARY = _Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]


def _after(
    call_of: Callable[..., Any], run: Callable[[Any], Any], name: str = "", *, has_result: bool = True
) -> Callable[..., Any]:
    """A kernel of an operator's arguments, from one of a call. `name`: an operator without forward mode."""

    def kernel(*args: Any) -> Any:
        # Kernels below autograd cannot see tangents. Without this error they would be dropped silently.
        if name and forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"epigemm::{name}: got a call under forward-mode automatic differentiation; accepted is reverse mode"
            )
        result = run(call_of(*args))
        return result if has_result else None

    return kernel


def _fake(operator: _Operator) -> Callable[[Any], Any]:
    """The shape of a call's result; an open log is told of the call."""

    def fake(call: Any) -> Any:
        shaped = operator.fake(call)
        return shaped if current.log is None else current.log.without_values(operator.implementation, call)

    return fake


def _saving(operator: _Operator) -> Callable[..., None]:
    """The function that `register_autograd` calls to save tensors for a derivative."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        operator.save(ctx, operator.call(*inputs), output)

    return setup_context


def _register() -> None:
    implement = _LIBRARY.impl
    for name, operator in _OPERATORS.items():
        call_of, qualified = operator.call, f"epigemm::{name}"
        implement(name, _after(call_of, operator.implementation, name), "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, _after(call_of, _fake(operator)), lib=_LIBRARY)
        torch.library.register_autograd(
            qualified, operator.backward, setup_context=_saving(operator), lib=_LIBRARY
        )
    for name, call_of, check, run in (
        ("linear_out", linear_out_call, checks.arguments, resolve.linear),
        ("elementwise_out", elementwise_call, checks.arguments, resolve.elementwise),
    ):
        op = getattr(ops, name).default
        implement(name, _after(call_of, run, has_result=False), "CompositeExplicitAutograd")
        torch.library.register_fake(f"epigemm::{name}", _after(call_of, check), lib=_LIBRARY)
        implement(name, _refuse_gradients(op), "Autograd", with_keyset=True)
        implement(name, _bump_version(op), "ADInplaceOrView", with_keyset=True)
    of_blocks = _after(linear_in_blocks_call, _in_blocks(resolve.run), "linear_in_blocks")
    implement("linear_in_blocks", of_blocks, "CompositeExplicitAutograd")
    fake = _after(linear_in_blocks_call, _in_blocks(_checked_out))
    torch.library.register_fake("epigemm::linear_in_blocks", fake, lib=_LIBRARY)
    implement("linear", _after(linear_call, vmap.linear_batched), "Batched")
    for name, rule in (
        ("linear", vmap.vmap_rule(ops.linear)),
        ("elementwise", vmap.vmap_rule(ops.elementwise)),
        ("linear_in_blocks", vmap.linear_in_blocks_vmap),
        ("fold_batch_norm", vmap.fold_batch_norm_vmap),
    ):
        torch.library.register_vmap(f"epigemm::{name}", rule, lib=_LIBRARY)
    decompose_in_inductor(
        {
            ops.linear.default: _after(linear_call, graphs.in_inductor),
            ops.linear_with_product.default: _after(linear_call, graphs.with_product_in_inductor),
            ops.elementwise.default: _after(elementwise_call, graphs.in_inductor),
        }
    )


def _count_flops(counter: ModuleType) -> None:
    """What `torch.utils.flop_counter` counts: the products, as for the PyTorch that they replace."""
    for name in ("linear", "linear_in_blocks", "linear_with_product", "linear_out", "_into"):
        operator = getattr(ops, name)
        before = [each.name for each in operator.default._schema.arguments].index("x")

        def formula(*args: Any, before: int = before, **_: Any) -> int:
            x, weight = args[before : before + 2]  # their shapes
            return 2 * int(prod(x)) * int(weight[0]) if weight else 0

        counter.register_flop_formula(operator)(formula)


_register()
# It imports Triton, which takes longer than the rest of epigemm.
when_imported("torch.utils.flop_counter", _count_flops)
