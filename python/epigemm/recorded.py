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
        with _Nested(ctx):
            operator.setup_context(ctx, args, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with _Nested(ctx):
            found = ctx.operator.backward(ctx, grad)
        flat: list[Any] = []
        for gradient, length in zip(found, ctx.lengths, strict=True):
            if length < 0:
                flat.append(gradient)
            else:
                flat += [None] * length if gradient is None else gradient
        return None, None, *flat


class _Nested:
    """Shows `needs_input_grad` of a node as the derivatives read it: a list for each list."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self._flat = ctx, ctx.needs_input_grad

    def __enter__(self) -> None:
        nested: list[Any] = []
        at = 2
        for length in self._ctx.lengths:
            nested.append(self._flat[at] if length < 0 else list(self._flat[at : at + length]))
            at += abs(length)
        self._ctx.needs_input_grad = tuple(nested)

    def __exit__(self, *error: object) -> None:
        self._ctx.needs_input_grad = self._flat


def _flat(args: Sequence[Any]) -> Iterable[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg
