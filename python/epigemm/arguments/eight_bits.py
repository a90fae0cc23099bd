"""Products of 8-bit numbers: what a call gives besides x and the weight, and its checks.

The numbers stand for themselves times a scale: one for a whole tensor, or one for each row of x or of the weight. Or
each 128 columns of a row of x have one, and each 128 x 128 numbers of the weight. The scales are factors of the sums,
or of those of a block's 128 products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import calls, checks
from epigemm.arguments.calls import BLOCKS, EIGHT_BITS, EightBits, OutScale, Scaled, blocks_of, is_in_blocks
from epigemm.arguments.precision import FAST, PROMOTED

E4M3 = EIGHT_BITS[0]
RESULTS = (torch.bfloat16, torch.float16, torch.float32, E4M3)
"""The types that a result may have; the first is the default."""
MULTIPLE = 16
"""K is one of it."""
_DEVICES = ("cpu", "cuda", "meta")
_ACCUMULATE = (PROMOTED, FAST)
BLOCK = 128
"""Columns of a block; of the weight also its rows."""
RECIPES = ("tensor", "row", BLOCKS)
"""What one scale is for in a layer of 8 bits, by the number of axes of its weight's scale."""
_LEAST_FP32 = 2.0**-149
_OUT_SCALES = f"a number > 0, a 0-d float32 tensor on x's device, or {BLOCKS!r}"


def checked(
    x: Tensor, weight: Tensor, asked: Scaled | EightBits, widths: Sequence[int] | None = None
) -> EightBits:
    """What a call gives beside these tensors, with the scales as `EightBits` has them in a `LinearCall`.

    `widths`: of a pair of products the N of each; both have scales in `weight_scale`.

    Raises:
        TypeError: something is no tensor, dtype or string.
        ValueError: unknown `accumulate` or `out_dtype`; an `out_scale` that is no scale.
        RuntimeError: types, shapes, devices that do not fit.
    """
    x_scale, weight_scale, out_dtype, accumulate, out_scale = asked
    if not isinstance(accumulate, str):
        raise TypeError(f"accumulate: got {type(accumulate).__name__}; accepted are 'promoted' and 'fast'")
    if accumulate not in _ACCUMULATE:
        raise ValueError(f"accumulate: got {accumulate!r}; accepted are 'promoted' and 'fast'")
    if out_dtype is None:
        out_dtype = RESULTS[0]
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {type(out_dtype).__name__}; accepted is a torch.dtype or None")
    if out_dtype not in RESULTS:
        accepted = ", ".join(map(str, RESULTS))
        raise ValueError(f"out_dtype: got {out_dtype}; accepted are {accepted}")
    types(x, weight)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        checks.shapes(x, weight)
    if weight.shape[1] % MULTIPLE:
        raise RuntimeError(f"x: got K = {weight.shape[1]} in 8 bits; accepted are multiples of {MULTIPLE}")
    scales = _scales(x, x_scale, weight_scale, [weight.shape[0]] if widths is None else widths)
    found = EightBits(*scales, out_dtype, accumulate, _out_scale(out_scale, out_dtype, x))
    if is_in_blocks(found):
        _check_blocks(x, weight, accumulate)
    return found


def _check_blocks(x: Tensor, weight: Tensor, accumulate: str) -> None:
    """An error unless a call with scales of blocks has the types and sums of one."""
    if accumulate == FAST:
        raise ValueError("accumulate: got 'fast' with scales of blocks; accepted there is 'promoted'")
    for name, each in (("x", x), ("weight", weight)):
        if each.dtype is not E4M3:
            raise RuntimeError(
                f"{name}: got dtype {each.dtype} with scales of blocks; accepted there is {E4M3}"
            )


def blocks(length: int) -> int:
    """How many blocks there are in so many rows or columns; the last one may be short."""
    return -(-length // BLOCK)


def memory_of_blocks(out_scale: OutScale, x: Tensor, weight: Tensor) -> OutScale:
    """`[ceil(N / 128), M]` for the scales of a result's blocks in place of `BLOCKS`; of unchecked arguments, too."""
    if not isinstance(out_scale, str) or out_scale != BLOCKS:
        return out_scale
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() == 0 or weight.dim() != 2:
        return out_scale
    shape = (blocks(weight.shape[0]), math.prod(x.shape[:-1]))
    return x.new_empty(shape, dtype=torch.float32)


def with_blocks(result: Tensor, memory: OutScale) -> Tensor:
    """A result as callers get it: where its blocks have scales, a pair with these.

    They are `[..., ceil(N / 128)]`, and those of a block lie side by side, as `torch._scaled_mm` reads them.
    """
    if (memory := blocks_of(memory)) is None:
        return result
    scales = memory.t() if result.dim() == 2 else memory.view(len(memory), *result.shape[:-1]).movedim(0, -1)
    return result, scales  # type: ignore[return-value]


def quantised(y: Tensor, scale: Tensor | float) -> Tensor:
    """A result in e4m3: y / scale, saturated. A matrix of scales receives those of blocks."""
    wide, largest = y.float(), torch.finfo(E4M3).max
    # On a GPU torch multiplies by the reciprocal of a number, but divides by a tensor.
    if not isinstance(scale, Tensor):
        scale = wide.new_full((), scale)
    if not scale.dim():
        return (wide / scale).clamp(-largest, largest).to(E4M3)
    whole, found = in_blocks(y.reshape(scale.shape[1], y.shape[-1]), height=1)
    scale.copy_(found.t())
    return whole.view(y.shape)


def of_products(about: EightBits) -> tuple[EightBits, EightBits]:
    """What each product of a pair has; the second one's result is an operand of the call of the first one."""
    scale: Tensor = about.weight_scale  # type: ignore[assignment]
    first, second = (scale, scale) if scale.dim() == 0 else scale.chunk(2)
    operand = about._replace(weight_scale=second, out_dtype=calls.operand_dtype(about), out_scale=None)
    return about._replace(weight_scale=first), operand


def by_recipe(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """x in e4m3, and its `x_scale`."""
    if recipe != BLOCKS or not x.dim():  # the call refuses the latter
        return scaled(x, of_rows=recipe != RECIPES[0])
    whole, scale = in_blocks(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), height=1)
    return whole.view(x.shape), scale.t().contiguous().t()  # in the order in which kernels give them


def of_weights(products: Sequence[Tensor], recipe: str) -> tuple[Tensor, Tensor]:
    """The weights of products, one below the other, in e4m3, and their `weight_scale`; a block has rows of one."""
    if recipe == BLOCKS:
        whole, scale = map(torch.cat, zip(*[in_blocks(each, BLOCK) for each in products], strict=True))
        return whole, scale
    whole, scale = scaled(torch.cat([*products]), of_rows=recipe != RECIPES[0])
    return whole, scale.flatten() if scale.dim() else scale


def check_unquantised(x: Tensor) -> None:
    """An error unless a layer of 8 bits takes this x."""
    checks.tensors(x=x)
    if x.dtype not in RESULTS[:3]:
        accepted = "torch.bfloat16, torch.float16 and torch.float32"
        raise RuntimeError(f"x: got dtype {x.dtype} beside a quantised weight; accepted are {accepted}")
    refuse_gradients([("x", x)])


def in_blocks(matrix: Tensor, height: int, width: int = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and the fp32 scales of its blocks of so many rows and columns; the last ones may be short."""
    sizes = rows, columns = matrix.shape
    height, width = min(height, rows) or 1, min(width, columns) or 1
    for axis, length in enumerate((height, width)):
        if short := sizes[axis] % length:
            pieces = torch.split(matrix, [sizes[axis] - short, short], axis)
            parts = zip(*[in_blocks(each, height, width) for each in pieces], strict=True)
            whole, scale = (torch.cat(each, axis) for each in parts)
            return whole, scale
    every = matrix.reshape(rows // height, height, columns // width, width).transpose(1, 2)
    whole, scale = scaled(every.flatten(2), of_rows=True)
    return whole.view(every.shape).transpose(1, 2).reshape(matrix.shape), scale[..., 0]


def scaled(tensor: Tensor, *, of_rows: bool) -> tuple[Tensor, Tensor]:
    """A tensor in e4m3, and the fp32 scale of each row, `[..., 1]`, or of all: as those of a result's blocks."""
    if not tensor.numel():  # compilers have no norms of no numbers
        largest = tensor.new_zeros((*tensor.shape[:-1], 1) if of_rows else (), dtype=torch.float32)
    else:
        largest = torch.linalg.vector_norm(tensor, math.inf, -1, keepdim=True, dtype=torch.float32)
        largest = largest if of_rows else largest.amax()
    scale = largest.clamp(min=2.0**-100) / largest.new_full((), torch.finfo(E4M3).max)
    # By a 0-d tensor torch would divide 16 bits in 16 bits.
    return (tensor / (scale if of_rows else scale.reshape(1))).to(E4M3), scale


def types(x: Tensor, weight: Tensor) -> None:
    """RuntimeError unless x and weight are e4m3, or one of them is e5m2, on a device that computes with them."""
    accepted = " and ".join(map(str, EIGHT_BITS))
    for name, each in (("x", x), ("weight", weight)):
        checks.strided(name, each)
        if each.dtype not in EIGHT_BITS:
            why = (
                "with x_scale, weight_scale, out_dtype, out_scale or accumulate"
                if name == "x"
                else f"beside an x of {x.dtype}"
            )
            raise RuntimeError(f"{name}: got dtype {each.dtype} {why}; accepted are {accepted}")
    if x.device.type not in _DEVICES:
        raise RuntimeError(f"x: got device {x.device} in 8 bits; accepted are CPUs and CUDA GPUs")
    checks.require_device("weight", weight, x)
    if x.dtype == weight.dtype == EIGHT_BITS[1]:
        raise RuntimeError(
            f"weight: got dtype {weight.dtype} beside an x of the same; accepted is {EIGHT_BITS[0]} for one of them"
        )


def refuse_gradients(named: Iterable[tuple[str, object]]) -> None:
    """RuntimeError where autograd would record a call that reads these."""
    if not torch.is_grad_enabled():
        return
    for name, each in named:
        if isinstance(each, Tensor) and each.requires_grad:
            raise RuntimeError(
                f"{name}: got a tensor that requires a gradient, which products of 8 bits do not have; accepted are "
                "tensors without one, or a call under torch.no_grad()"
            )


def _out_scale(scale: OutScale, dtype: torch.dtype, x: Tensor) -> OutScale:
    if scale is None and dtype is E4M3:
        raise RuntimeError(f"out_scale: got None with out_dtype={E4M3}; accepted is {_OUT_SCALES}")
    if scale is not None and dtype is not E4M3:
        got = "a tensor" if isinstance(scale, Tensor) else repr(scale)
        raise RuntimeError(
            f"out_scale: got {got} with a result of {dtype}; accepted is None, or out_dtype={E4M3}"
        )
    if scale is None:
        return None
    if isinstance(scale, str):
        if scale == BLOCKS:
            return BLOCKS
        raise ValueError(f"out_scale: got {scale!r}; accepted is {_OUT_SCALES}")
    if isinstance(scale, bool) or not isinstance(scale, (Tensor, float, int)):
        raise TypeError(f"out_scale: got {type(scale).__name__}; accepted is {_OUT_SCALES}")
    if not isinstance(scale, Tensor):
        number = float(scale)
        if not _LEAST_FP32 <= number <= torch.finfo(torch.float32).max:
            raise ValueError(f"out_scale: got {scale}; accepted is {_OUT_SCALES}, finite in fp32")
        return number
    checks.strided("out_scale", scale)
    if scale.dtype is not torch.float32:
        raise RuntimeError(f"out_scale: got dtype {scale.dtype}; accepted is torch.float32")
    checks.require_device("out_scale", scale, x)
    if scale.dim():
        raise RuntimeError(f"out_scale: got shape {[*scale.shape]}; accepted is [], or {BLOCKS!r}")
    return scale


def _scales(x: Tensor, x_scale: object, weight_scale: object, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The scales as calls have them: each 0-d or a vector, or both of blocks, matrices."""
    lead, count, across = [*x.shape[:-1]], sum(widths), blocks(x.shape[-1])
    rows, down = math.prod(lead), sum(map(blocks, widths))
    of_rows, of_blocks = [[], [rows], lead, [rows, 1], [*lead, 1]], [[rows, across], [*lead, across]]
    of_columns, of_squares = [[], [count], [1, count]], [[down, across]]
    by_row = _fp32("x_scale", x_scale, x, of_rows, of_blocks)
    by_column = _fp32("weight_scale", weight_scale, x, of_columns, of_squares)
    shapes = [*by_row.shape], [*by_column.shape]
    # Of one block and one row of the weight both fit, with the same numbers.
    if shapes[0] in of_rows and shapes[1] in of_columns:
        return _flat(by_row), _flat(by_column)
    if shapes[0] in of_blocks and shapes[1] in of_squares:
        return by_row.reshape(rows, across), by_column
    raise RuntimeError(
        f"weight_scale: got shape {shapes[1]} beside an x_scale of {shapes[0]}; accepted are scales of blocks of "
        f"both, {of_blocks[0]} with {of_squares[0]}, or of none: [] or [{rows}] with [] or [{count}]"
    )


def _fp32(name: str, scale: object, x: Tensor, plain: list[Any], of_blocks: list[Any]) -> Tensor:
    """A scale that has one of these shapes."""
    if scale is None:
        raise RuntimeError(
            f"{name}: got None with an x of {x.dtype}; accepted is a float32 tensor {_either(plain)}"
        )
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: got {type(scale).__name__}; accepted is a float32 tensor {_either(plain)}")
    checks.strided(name, scale)
    if scale.dtype is not torch.float32:
        raise RuntimeError(f"{name}: got dtype {scale.dtype}; accepted is torch.float32")
    checks.require_device(name, scale, x)
    shape = [*scale.shape]
    if shape not in plain and shape not in of_blocks:
        raise RuntimeError(
            f"{name}: got shape {shape}; accepted is {_either(plain)}, one number for the tensor or one for each row, "
            f"or {_either(of_blocks)} of blocks"
        )
    return scale


def _flat(scale: Tensor) -> Tensor:
    return scale if scale.dim() == 0 else scale.reshape(-1).contiguous()


def _either(shapes: list[Any]) -> str:
    # Only for an error: Dynamo traces no text of a list of symbols.
    return " or ".join(dict.fromkeys(map(str, shapes)))
