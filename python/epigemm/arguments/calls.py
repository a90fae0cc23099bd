"""The arguments of a call in one object, which is made if the C++ entry has not made the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments.precision import DEFAULT, ORDERS, Order, order
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.registry import BIAS, FOLDED, Epilogue

# What a call may do with its weight's pack: the argument `pack` of the operators.
KEEP = "keep"  # use the pack, and make it if there is none: for callers that keep packs
FIND = "find"  # use a kept pack if it is current, but make none
NONE = "none"  # neither use nor make one: a gradient of the weight is needed


class LinearCall(NamedTuple):
    """D = epilogue(x @ weight.T): the arguments of the operator `epigemm::linear`, in its order, and `out`."""

    epilogue: Epilogue  # what follows the product
    x: Tensor  # `[..., K]`
    weight: Tensor  # `[N, K]`
    bias: Tensor | None = None  # `[N]` or None
    operands: Sequence[Tensor] = ()  # the epilogue's vectors, then its scalar if that is a tensor
    scalars: Sequence[float] = ()  # its scalar if that is a number
    precision: str = DEFAULT  # what an fp32 product gets, `DEFAULT` for torch's setting
    pack_use: str = FIND  # what the call may do with the weight's pack: `KEEP`, `FIND` or `NONE`
    strict: bool = False  # raise instead of running torch's GEMM
    invariant: bool = False  # the bits of a row may not depend on the others
    out: Tensor | None = None  # where the result goes; None: a new contiguous tensor

    @property
    def rows(self) -> int:
        """M."""
        return math.prod(self.x.shape[:-1])

    @property
    def is_empty(self) -> bool:
        """Whether nothing is multiplied."""
        return self.x.numel() == 0 or self.weight.numel() == 0

    @property
    def order(self) -> Order:
        """The arithmetics that the call may run in; only fp32 has more than one. ValueError: unknown precision."""
        x = self.x
        return order(self.precision, x.device.type) if x.dtype is torch.float32 else ORDERS[0]

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Every tensor that is read."""
        return (self.x, self.weight, self.bias, *self.operands)

    @property
    def others(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is read, but x, and its name."""
        return [("weight", self.weight), *_named_operands(self)]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operator `epigemm::linear`."""
        return (self.epilogue.name, *self[1:10])

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each of `operands` is broadcast along: its kind in the epilogue."""
        given = self.epilogue.in_order(None, self.operands, self.scalars) or ()
        every = zip(self.epilogue.operands[1:], given, strict=True)
        return tuple(operand.kind for operand, value in every if isinstance(value, Tensor))

    def new_out(self) -> Tensor:
        """An empty contiguous tensor for the result."""
        x, columns = self.x, self.weight.shape[0]
        if x.dim() == 2:
            # Twice as fast as new_empty with a tuple.
            return torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
        return x.new_empty((*x.shape[:-1], columns))

    def with_bias_in_product(self) -> LinearCall:
        """The same call with a linked epilogue's bias as the bias of the product, for callers that round the product.

        The epilogue's operand is removed, or becomes -0, which changes no sum. If the product has a bias already,
        nothing changes.
        """
        place = self.epilogue.bias_place
        if place is None or self.bias is not None:
            return self
        before = self.epilogue.operands[1:place]
        index = sum(operand.kind != SCALAR or not self.scalars for operand in before)
        bias, operands = self.operands[index], list(self.operands)
        if (after := self.epilogue.after_bias) is not None:
            del operands[index]
            return self._replace(epilogue=after, bias=bias, operands=operands)
        operands[index] = torch.full_like(bias, -0.0, requires_grad=False)
        return self._replace(bias=bias, operands=operands)

    def product(self) -> LinearCall:
        """The same call without the epilogue, except for a bias that the product has."""
        _, x, weight, bias, _, _, precision, pack_use, _, invariant, _ = self
        return LinearCall(BIAS, x, weight, bias, (), (), precision, pack_use, False, invariant)


class ElementwiseCall(NamedTuple):
    """D = epilogue(x): the arguments of the operator `epigemm::elementwise`, in its order, and `out`.

    Attributes as of `LinearCall`; x may have any shape, and `out` may be x itself.
    """

    epilogue: Epilogue
    x: Tensor
    bias: Tensor | None = None
    operands: Sequence[Tensor] = ()
    scalars: Sequence[float] = ()
    out: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Every tensor that is read."""
        return (self.x, self.bias, *self.operands)

    @property
    def others(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is read, but x, and its name."""
        return _named_operands(self)


def _named_operands(call: LinearCall | ElementwiseCall) -> list[tuple[str, Tensor]]:
    given = call.epilogue.in_order(call.bias, call.operands, call.scalars)
    assert given is not None  # the call was checked
    every = zip(call.epilogue.operands[1:], given, strict=True)
    return [(operand.name, value) for operand, value in every if isinstance(value, Tensor)]


Vectors = Sequence[Tensor | None]
"""The vectors that a BatchNorm fold reads: those of `epilogues.FOLDED`, in that order."""


class FoldCall(NamedTuple):
    """A BatchNorm fold, whose vectors have been checked."""

    like: Tensor  # gives the device and the arithmetic type
    columns: int  # the length of the vectors
    vectors: Vectors  # those of `epilogues.FOLDED`
    eps: float  # BatchNorm's epsilon

    @property
    def named(self) -> dict[str, Tensor | None]:
        """The vectors by their names."""
        return dict(zip(FOLDED, self.vectors, strict=True))
