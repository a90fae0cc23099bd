"""Registers the operators' implementation, fake kernels, derivatives and vmap rules with torch.

The schemas come from the native module; this is what makes `torch.ops.epigemm.*` right when called directly,
under autograd, `torch.compile` and `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from epigemm import autograd, batching, checks, entry, execution, fixed, gradients, packs, products
from epigemm._native import ops
from epigemm.epilogues import BIAS, EPILOGUES, FOLDED, compute_dtype


class _Library(torch.library.Library):
    """torch's, except that the derivatives' kernels take a look at the arguments before they run the operator."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """As torch's: `register_autograd` comes here with the kernel that it has made."""
        if dispatch_key == "Autograd" and op_name in _OPERATORS:
            if op_name == "linear":
                fn = _keeping_the_product(_without_packs_of_changing_weights(fn))
            fn = _at_once(fn, _OPERATORS[op_name])
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


class _Operator(NamedTuple):
    """What an operator is made of.

    Attributes:
        plain: the call where nobody has to see it, None where somebody has.
        implementation: below autograd.
        recorded: with a node in autograd's graph, for plain tensors that nothing traces.
        setup_context: saves what the derivative needs, for all others.
        backward: the derivative, for all others.
    """

    plain: Callable[..., Tensor | None]
    implementation: Callable[..., Tensor]
    recorded: Callable[..., Tensor]
    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]


def _at_once(kernel: Callable[..., Tensor], operator: _Operator) -> Callable[..., Tensor]:
    """`kernel`, an autograd kernel, but past the rest of the dispatcher where nothing traces the call.

    To get through it takes the host longer than the launch; compiled graphs make every call here. AOTInductor's
    packages, which hand empty lists over as None, would not get through at all.
    """

    def autograd_kernel(keyset: Any, *args: Any) -> Tensor:
        found = operator.plain(*args)
        if found is not None:
            return found
        inputs = _tensors_in(args)
        if not products.runs_directly(*inputs):
            return kernel(keyset, *args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return operator.recorded(*args)
        return operator.implementation(*args)

    return autograd_kernel


def _without_packs_of_changing_weights(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`kernel`, the autograd kernel of `linear`, with no use of the pack of a weight that a gradient is asked for.

    Such a weight is about to change, by whatever means: its pack would be made again in any case, and must not outlive
    a change that nothing counts, so that the operator has it expire. Only here is it known of traced calls: below
    autograd no kernel sees whether gradients are enabled.
    """
    names = [argument.name for argument in ops.linear.default._schema.arguments]
    weight, pack = names.index("weight"), names.index("pack")

    def autograd_kernel(keyset: Any, *args: Any) -> Tensor:
        if torch.is_grad_enabled() and args[weight].requires_grad:
            args = (*args[:pack], packs.NONE, *args[pack + 1 :])
        return kernel(keyset, *args)

    return autograd_kernel


def _keeping_the_product(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`kernel`, the autograd kernel of `linear`, but two operators where `gradients.keeps_product`."""
    names = [argument.name for argument in ops.linear.default._schema.arguments]

    def autograd_kernel(keyset: Any, *args: Any) -> Tensor:
        epilogue, x, weight, bias, operands, scalars, precision, *others = args
        inputs = (x, weight, bias, *operands)
        given = dict(zip(names[7:], others, strict=False))
        spec = EPILOGUES.get(epilogue)
        if (
            spec is None
            or not torch.is_grad_enabled()
            or not any(tensor is not None and tensor.requires_grad for tensor in inputs)
            or not gradients.keeps_product(spec, x, operands, given.get("strict", False))
        ):
            return kernel(keyset, *args)
        # The operators below would not know what is wrong with the call as a whole, or only when half of it has run.
        spec = checks.epilogue_named(epilogue, linear=True)
        checks.linear(spec, x, weight, bias, operands, scalars, precision, None)
        product: Tensor = ops.linear(BIAS.name, x, weight, bias, [], [], precision, **given)
        result: Tensor = ops.elementwise(epilogue, product, None, operands, scalars)
        return result

    return autograd_kernel


def _linear(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack: str = packs.FIND,
    strict: bool = False,
    invariant: bool = False,
    *,
    run: Callable[..., Tensor] = autograd.linear_forward,
) -> Tensor:
    _refuse_forward_mode("linear")
    spec = checks.epilogue_named(epilogue, linear=True)
    pack_use = packs.checked_use(pack)
    operands, scalars = operands or (), scalars or ()
    return run(spec, x, weight, bias, operands, scalars, precision, pack_use, strict, invariant)


def _linear_fake(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack: str = packs.FIND,
    strict: bool = False,
    invariant: bool = False,
) -> Tensor:
    spec = checks.epilogue_named(epilogue, linear=True)
    checks.linear(spec, x, weight, bias, operands, scalars, precision, None)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_out(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
    pack: str = packs.FIND,
    strict: bool = False,
    invariant: bool = False,
) -> None:
    spec = checks.epilogue_named(epilogue, linear=True)
    checks.linear(spec, x, weight, bias, operands, scalars, precision, out)
    checks.output_overlap(out, x, (weight, bias, *operands), in_place=False)
    pack_use = packs.checked_use(pack)
    forward = fixed.linear_forward if invariant else execution.linear_forward
    forward(spec, x, weight, bias, operands, scalars, precision, out, pack_use=pack_use, strict=strict)


def _linear_out_fake(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
    pack: str = packs.FIND,
    strict: bool = False,
    invariant: bool = False,
) -> None:
    spec = checks.epilogue_named(epilogue, linear=True)
    checks.linear(spec, x, weight, bias, operands, scalars, precision, out)


def _elementwise(
    epilogue: str,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    *,
    run: Callable[..., Tensor] = autograd.elementwise_forward,
) -> Tensor:
    _refuse_forward_mode("elementwise")
    spec = checks.epilogue_named(epilogue, linear=False)
    return run(spec, x, bias, operands or (), scalars or ())


def _elementwise_fake(
    epilogue: str, x: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
) -> Tensor:
    spec = checks.epilogue_named(epilogue, linear=False)
    checks.elementwise(spec, x, bias, operands, scalars, None)
    return torch.empty_like(x)


def _elementwise_out(
    epilogue: str,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    out: Tensor,
) -> None:
    spec = checks.epilogue_named(epilogue, linear=False)
    checks.elementwise(spec, x, bias, operands, scalars, out)
    checks.output_overlap(out, x, (bias, *operands), in_place=True)
    execution.elementwise_forward(spec, x, bias, operands, scalars, out)


def _elementwise_out_fake(
    epilogue: str,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    out: Tensor,
) -> None:
    spec = checks.epilogue_named(epilogue, linear=False)
    checks.elementwise(spec, x, bias, operands, scalars, out)


def _fold_batch_norm(
    like: Tensor,
    *vectors_and_eps: Any,
    run: Callable[..., Tensor] = execution.fold_batch_norm_forward,
) -> Tensor:
    _refuse_forward_mode("fold_batch_norm")
    *vectors, eps = vectors_and_eps
    columns = checks.fold_batch_norm(like, dict(zip(FOLDED, vectors, strict=True)), eps, None)
    return run(like, columns, vectors, eps)


def _fold_recorded(like: Tensor, columns: int, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    return torch.stack(autograd.fold_batch_norm(like, columns, vectors, eps))


def _fold_batch_norm_fake(like: Tensor, *vectors_and_eps: Any) -> Tensor:
    *vectors, eps = vectors_and_eps
    columns = checks.fold_batch_norm(like, dict(zip(FOLDED, vectors, strict=True)), eps, None)
    return like.new_empty((2, columns), dtype=compute_dtype(like.dtype))


def _refuse_forward_mode(name: str) -> None:
    # Below autograd the tangents cannot be seen any more: without this they would be dropped in silence.
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"epigemm::{name}: forward-mode derivatives (torch.func.jvp, dual tensors) are not supported; "
            "accepted are reverse-mode ones"
        )


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
    """The ADInplaceOrView kernel: whoever saved `out` for a backward pass must notice that it was written."""
    out = [argument.name for argument in op._schema.arguments].index("out")

    def adinplaceorview(keyset: Any, *args: Any) -> None:
        entry.mark_written(args[out])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return adinplaceorview


def _tensors_in(args: Sequence[Any]) -> list[Tensor]:
    flat = [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [leaf for leaf in flat if isinstance(leaf, Tensor)]


def _plain_linear(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor] | None,
    scalars: Sequence[float] | None,
    precision: str,
    pack: str = packs.FIND,
    strict: bool = False,
    invariant: bool = False,
) -> Tensor | None:
    spec = EPILOGUES.get(epilogue)
    if spec is None or not spec.linear or invariant or pack not in (packs.KEEP, packs.FIND):
        return None
    return entry.linear_operator(
        spec, x, weight, bias, operands or (), scalars or (), precision, pack, strict
    )


def _plain_elementwise(
    epilogue: str,
    x: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor] | None,
    scalars: Sequence[float] | None,
) -> Tensor | None:
    spec = EPILOGUES.get(epilogue)
    if spec is None:
        return None
    return entry.elementwise_operator(spec, x, bias, operands or (), scalars or ())


def _plain_fold(*args: Any) -> None:
    return None  # the entry folds as a part of other calls


_OPERATORS = {
    "linear": _Operator(
        _plain_linear,
        _linear,
        partial(_linear, run=autograd.linear),
        gradients.linear_setup_context,
        gradients.linear_backward,
    ),
    "elementwise": _Operator(
        _plain_elementwise,
        _elementwise,
        partial(_elementwise, run=autograd.elementwise),
        gradients.elementwise_setup_context,
        gradients.elementwise_backward,
    ),
    "fold_batch_norm": _Operator(
        _plain_fold,
        _fold_batch_norm,
        partial(_fold_batch_norm, run=_fold_recorded),
        gradients.fold_batch_norm_setup_context,
        gradients.fold_batch_norm_backward,
    ),
}
_LIBRARY = _Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]


def _implement(name: str, kernel: Callable[..., Any], key: str, *, with_keyset: bool = False) -> None:
    _LIBRARY.impl(name, kernel, key, with_keyset=with_keyset)


def _register() -> None:
    for name, implementation, fake in (
        ("linear", _linear, _linear_fake),
        ("linear_out", _linear_out, _linear_out_fake),
        ("elementwise", _elementwise, _elementwise_fake),
        ("elementwise_out", _elementwise_out, _elementwise_out_fake),
        ("fold_batch_norm", _fold_batch_norm, _fold_batch_norm_fake),
    ):
        _implement(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"epigemm::{name}", fake, lib=_LIBRARY)
    for name, operator in _OPERATORS.items():
        torch.library.register_autograd(
            f"epigemm::{name}", operator.backward, setup_context=operator.setup_context, lib=_LIBRARY
        )
    for name in ("linear_out", "elementwise_out"):
        op = getattr(ops, name).default
        _implement(name, _refuse_gradients(op), "Autograd", with_keyset=True)
        _implement(name, _bump_version(op), "ADInplaceOrView", with_keyset=True)
    _implement("linear", batching.linear_batched, "Batched")
    for name, rule in (
        ("linear", batching.vmap_rule(ops.linear)),
        ("elementwise", batching.vmap_rule(ops.elementwise)),
        ("fold_batch_norm", batching.fold_batch_norm_vmap),
    ):
        torch.library.register_vmap(f"epigemm::{name}", rule, lib=_LIBRARY)


_register()
