"""Pairs of products of one x: two weights and biases, or one of each with the rows of both, and their checks."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.arguments import autocast, checks, eight_bits
from epigemm.arguments.calls import EightBits, Scaled, is_in_blocks, operand_dtype, scales_read

Pair = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x @ weight.T + bias and x @ weight2.T + bias2; without weight2 weight and bias have the rows of both.

The last is `offs`: the ends of groups of rows, each with weights of its own.
"""
_NAMES = ("x", "weight", "bias", "weight2", "bias2", "offs")


def checked(
    pair: Pair, out: Tensor | None, precision: str | None, strict: bool, given: Scaled | None
) -> tuple[Pair, EightBits | None]:
    """The pair as two weights, with autocast's types, and what of 8 bits was `given`, all checked."""
    x, weight, bias, weight2, bias2, offs = pair
    checks.tensors(x=x, weight=weight)
    checks.optional_tensors(bias=bias, weight2=weight2, bias2=bias2, out=out)
    if out is not None:
        _check_out(out, pair)
    if precision is not None:
        checks.precision(precision)
    if strict is not False:
        checks.flag("strict", strict)
    scaled = None if given is None else _of_eight_bits(pair, out, given)
    if given is None and autocast.is_any_on():
        x, weight, (bias, weight2, bias2) = autocast.cast(x, weight, bias, weight2, bias2)
    if offs is not None:
        checks.tensors(offs=offs)
        checks.groups(x, weight, offs)
    elif scaled is None:
        checks.product(x, weight)
    rows = weight.shape[-2]
    if weight2 is None and rows % 2:
        each = "an even number of rows" if offs is None else "an even number of rows a group"
        raise RuntimeError(
            f"weight: got shape {[*weight.shape]}; accepted is {each}, half of them for each product, or a weight2 "
            "beside it"
        )
    if weight2 is None and bias2 is not None:
        raise RuntimeError(
            "bias2: got a tensor without a weight2; accepted is None, and a bias for all rows of weight"
        )
    if weight2 is not None:
        checks.require_like("weight2", weight2, weight.dtype, x)
        if weight2.shape != weight.shape:
            raise RuntimeError(
                f"weight2: got shape {[*weight2.shape]}; accepted is {[*weight.shape]}, that of weight"
            )
    dtype = x.dtype if scaled is None else operand_dtype(scaled)
    for name, vector in (("bias", bias), ("bias2", bias2)):
        if vector is None:
            continue
        if scaled is None or vector.dtype is not torch.float32:
            checks.require_like(name, vector, dtype, x, of=dtype)
        if offs is None:
            checks.require_length(name, vector, rows)
        else:
            checks.require_vectors(name, vector, weight)
    if out is not None:
        shape = (*x.shape[:-1], rows // 2 if weight2 is None else rows)
        checks.require_out(out, shape, x, "x", None if scaled is None else scaled.out_dtype)
    if weight2 is None:
        # Views, by one node of autograd, which writes both gradients into one tensor.
        weight, weight2 = weight.chunk(2, -2)
        if bias is not None:
            bias, bias2 = bias.chunk(2, -1)
    return (x, weight, bias, weight2, bias2, offs), scaled


def _of_eight_bits(pair: Pair, out: Tensor | None, given: Scaled) -> EightBits:
    """What a call gives of 8 bits, after its checks."""
    x, weight, _, weight2, _, _ = pair
    eight_bits.types(x, weight)
    rows = weight.shape[0] if weight.dim() == 2 else 0
    widths = (rows // 2, rows - rows // 2) if weight2 is None else (rows, rows)
    scaled = eight_bits.checked(x, weight, given, widths)
    if weight2 is None and is_in_blocks(scaled) and widths[0] % eight_bits.BLOCK:
        raise RuntimeError(
            f"weight: got {widths[0]} rows for each product with scales of blocks; accepted are multiples of "
            f"{eight_bits.BLOCK}, or a weight2 beside it"
        )
    named = [*zip(_NAMES, pair, strict=True), *scales_read(scaled)]
    eight_bits.refuse_gradients(named)
    checks.own_memory(out, x, named[1:])
    return scaled


def _check_out(out: Tensor, pair: Pair) -> None:
    """RuntimeError, before the second product is launched, for an `out` that the first one could not be written to."""
    x, *others = pair
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (out, *pair)):
        name = "linear_glu" if pair[-1] is None else "grouped_linear_glu"
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    checks.own_memory(out, x, zip(_NAMES[1:], others, strict=True))
