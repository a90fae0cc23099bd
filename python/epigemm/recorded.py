"""Operators in autograd's graph, without what torch.library puts around them.

`torch.library.register_autograd` is right for every call, and takes the host a few hundred microseconds a layer, most
of it for nested arguments. Plain tensors that nobody traces take this node instead; both run the same derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Operator(NamedTuple):
    """What an operator is made of.

    Attributes:
        implementation: below autograd.
        setup_context: saves what the derivative needs.
        backward: the derivative.
    """

    implementation: Callable[..., Tensor]
    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]


def record(operator: Operator, args: Sequence[Any]) -> Tensor:
    """Call an operator with a node in autograd's graph."""
    result: Tensor = _Node.apply(operator, args, *_flat(args))  # type: ignore[no-untyped-call]
    return result


class _Node(torch.autograd.Function):
    """A call; tensors in lists are arguments of their own."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, args: Sequence[Any], *flat: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result = operator.implementation(*args)
        ctx.operator = operator
        ctx.lengths = [len(arg) if isinstance(arg, (list, tuple)) else -1 for arg in args]
        operator.setup_context(_Nested(ctx), args, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = ctx.operator.backward(_Nested(ctx), grad)
        flat: list[Any] = []
        for gradient, length in zip(found, ctx.lengths, strict=True):
            if length < 0:
                flat.append(gradient)
            else:
                flat += [None] * length if gradient is None else gradient
        return None, None, *flat


class _Nested:
    """A node as the derivatives read it: in `needs_input_grad` a list for each list.

    The node itself stays as it is: several threads may run backward through one graph.
    """

    def __init__(self, ctx: Any) -> None:
        nested: list[Any] = []
        flags, at = ctx.needs_input_grad, 2  # after the operator and its arguments
        for length in ctx.lengths:
            nested.append(flags[at] if length < 0 else list(flags[at : at + length]))
            at += abs(length)
        self.__dict__.update(_ctx=ctx, needs_input_grad=tuple(nested))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _flat(args: Sequence[Any]) -> Iterable[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg
