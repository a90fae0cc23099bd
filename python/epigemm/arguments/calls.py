"""The arguments of a call in one object, which is made if the C++ entry has not made the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments.precision import DEFAULT, OF_8_BITS, ORDERS, PROMOTED, Order, order
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import FOLDED, Epilogue, Operands, compute_dtype

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The 8-bit types of x and the weight."""


BLOCKS = "1x128"
"""As an `out_scale`: each 128 columns of a row of the result have a scale of their own."""
OutScale = Tensor | float | str | None


class EightBits(NamedTuple):
    """What a product of 8-bit numbers has besides; in a `LinearCall` it is checked."""

    # fp32: 0-d, or one number for each row of x, or one for each 128 columns of each row, `[M, ceil(K / 128)]`
    x_scale: Tensor | None
    # the same of the weight, but `[ceil(N / 128), ceil(K / 128)]`; of a pair the second one's numbers come last
    weight_scale: Tensor | None
    out_dtype: torch.dtype | None = None  # of the result; None: bf16
    accumulate: str = PROMOTED  # or `FAST`
    # Of an e4m3 result: what it is divided by, or `BLOCKS`. In a `LinearCall` contiguous `[ceil(N / 128), M]`, which
    # receives the scales of the blocks, is in place of the latter.
    out_scale: OutScale = None


# Functions, because Dynamo of torch 2.10 traces no property of a NamedTuple.


def operand_dtype(about: EightBits) -> torch.dtype:
    """That of the operands that have the result's type: beside an e4m3 result bf16."""
    return torch.bfloat16 if about.out_dtype in EIGHT_BITS else about.out_dtype  # type: ignore[return-value]


def is_in_blocks(about: EightBits) -> bool:
    """In a `LinearCall`: whether blocks of x and of the weight have scales."""
    return about.x_scale is not None and about.x_scale.dim() == 2


def blocks_of(out_scale: OutScale) -> Tensor | None:
    """In a `LinearCall`: the memory for the scales of the result's blocks, if it has them."""
    return out_scale if isinstance(out_scale, Tensor) and out_scale.dim() else None


def scales_read(about: EightBits) -> list[tuple[str, Tensor]]:
    """The scales that are read, and their names."""
    x_scale, weight_scale, _, _, out_scale = about
    scales = {"x_scale": x_scale, "weight_scale": weight_scale}
    if blocks_of(out_scale) is None:
        scales["out_scale"] = out_scale  # type: ignore[assignment]
    return [(name, each) for name, each in scales.items() if isinstance(each, Tensor)]


Scaled = tuple[Tensor | None, Tensor | None, torch.dtype | None, str, OutScale]
"""The fields of `EightBits` as callers of all functions give them."""
UNSCALED: Scaled = (None, None, None, PROMOTED, None)


def is_scaled(given: Scaled) -> bool:
    """Whether anything is given."""
    x_scale, weight_scale, out_dtype, accumulate, out_scale = given
    is_any = x_scale is not None or weight_scale is not None or out_dtype is not None or out_scale is not None
    return is_any or accumulate != PROMOTED


class Options(NamedTuple):
    """How a linear call is to be made, as its caller asks."""

    precision: str | None = None  # what an fp32 product gets; None: as torch's setting says
    strict: bool = False  # no fallback
    scaled: Scaled = UNSCALED  # for an x of 8 bits


AS_USUAL = Options()


def tensors_of(operands: Operands) -> list[Tensor]:
    """The tensors among a call's operands."""
    return [each for each in operands if isinstance(each, Tensor)]


class LinearCall(NamedTuple):
    """D = epilogue(x @ weight.T)."""

    epilogue: Epilogue  # what follows the product
    x: Tensor  # `[..., K]`
    weight: Tensor  # `[N, K]`
    operands: Operands = (None,)  # one for each of the epilogue's, in its order: as a rule a bias, or None
    precision: str = DEFAULT  # what an fp32 product gets, `DEFAULT` for torch's setting
    # a kept pack of the weight, if it is current; not if a gradient of the weight is needed
    uses_pack: bool = True
    strict: bool = False  # raise instead of running torch's GEMM
    invariant: bool = False  # the bits of a row may not depend on the others
    out: Tensor | None = None  # where the result goes; None: a new contiguous tensor
    weight2: Tensor | None = None  # of a pair: x @ weight2.T is the epilogue's first matrix, None here
    statistics: bool = False  # whether the kernel also gives the mean and the variance of each column
    fold: FoldCall | None = None  # what scale_batch_norm's operands are folded from; there are none then
    eight_bits: EightBits | None = None  # for an x and a weight of 8 bits
    # int32 `[E]`: rows of x are in groups that end there. Weights are `[E, N, K]` then, vectors along N `[E, N]`. Of
    # such a weight without ends x is `[E, M, K]`.
    group_ends: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of the result."""
        return self.x.dtype if self.eight_bits is None else self.eight_bits.out_dtype  # type: ignore[return-value]

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.shape[-2]

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
        if self.eight_bits is not None:
            return OF_8_BITS[self.eight_bits.accumulate]
        x = self.x
        return order(self.precision, x.device.type) if x.dtype is torch.float32 else ORDERS[0]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that is read."""
        weights = (self.weight,) if self.weight2 is None else (self.weight, self.weight2)
        scales = () if self.eight_bits is None else [each for _, each in scales_read(self.eight_bits)]
        ends = () if self.group_ends is None else (self.group_ends,)
        return (self.x, *weights, *tensors_of(self.operands), *scales, *ends)

    @property
    def others(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is read, but x, and its name."""
        if self.fold is not None:
            folded = self.fold.named.items()
            return [("weight", self.weight), *((name, each) for name, each in folded if each is not None)]
        scales = [] if self.eight_bits is None else scales_read(self.eight_bits)
        ends = [] if self.group_ends is None else [("offs", self.group_ends)]
        return [("weight", self.weight), *self.epilogue.named(self.operands), *scales, *ends]

    @property
    def bias(self) -> Tensor | None:
        """The operand that is added to the product before all else."""
        place = self.epilogue.bias_place
        return self.operands[place - 1] if place else None  # type: ignore[return-value]

    def new_out(self) -> Tensor:
        """An empty contiguous tensor for the result."""
        x, columns = self.x, self.weight.shape[-2]
        dtype = x.dtype if self.eight_bits is None else self.dtype
        if x.dim() == 2:
            # Twice as fast as new_empty with a tuple.
            return torch.empty(x.shape[0], columns, dtype=dtype, device=x.device)
        return x.new_empty((*x.shape[:-1], columns), dtype=dtype)

    def described(self) -> LinearCall:
        """The call, with operands without values in place of what is folded."""
        if self.fold is None:
            return self
        likes = self.x.new_empty((2, self.fold.columns), dtype=compute_dtype(self.x.dtype))
        return self._replace(operands=likes.unbind(0), fold=None)

    def product(self) -> LinearCall:
        """The same call of the product with its bias alone."""
        return self._replace(epilogue=BIAS, operands=(self.bias,), strict=False, out=None)

    def behind(self, product: Tensor) -> ElementwiseCall:
        """What follows the product, with whose bias it was added."""
        return ElementwiseCall(self.epilogue, product, self.epilogue.without_bias(self.operands))


class ElementwiseCall(NamedTuple):
    """D = epilogue(x). Attributes as of `LinearCall`; x may have any shape, and `out` may be x itself."""

    epilogue: Epilogue
    x: Tensor
    operands: Operands = (None,)
    out: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that is read."""
        return (self.x, *tensors_of(self.operands))

    @property
    def others(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is read, but x, and its name."""
        return self.epilogue.named(self.operands)

    def new_out(self) -> Tensor:
        """An empty tensor for the result."""
        return torch.empty_like(self.x)


def operator_arguments(call: LinearCall | ElementwiseCall) -> tuple[Any, ...]:
    """The arguments of the operator `epigemm::linear`, or `elementwise`, but for `out`.

    A function, because Dynamo of torch 2.10 traces no property of a NamedTuple.
    """
    epilogue, x = call.epilogue, call.x
    if not isinstance(call, LinearCall):
        return (epilogue.name, x, *epilogue.apart(call.operands))
    options: tuple[Any, ...] = (call.precision, call.uses_pack, call.strict, call.invariant)
    if call.eight_bits is not None:
        *scales, accumulate, out_scale = call.eight_bits
        options = (accumulate, *options[1:], *scales, out_scale)
    return (epilogue.name, x, call.weight, *epilogue.apart(call.operands), *options)


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
