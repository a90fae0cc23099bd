"""Products of 8-bit numbers: what a call gives besides x and the weight, and its checks.

The numbers stand for themselves times a scale: one for a whole tensor, or one for each row of x or of the weight. The
scales are factors of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import BLOCKS, EIGHT_BITS, EightBits, OutScale, Scaled, blocks_of
from epigemm.arguments.precision import FAST, PROMOTED

E4M3 = EIGHT_BITS[0]
RESULTS = (torch.bfloat16, torch.float16, torch.float32, E4M3)
"""The types that a result may have; the first is the default."""
MULTIPLE = 16
"""K is one of it."""
_DEVICES = ("cpu", "cuda", "meta")
_ACCUMULATE = (PROMOTED, FAST)
_BLOCK = 128  # columns of a result
_LEAST_FP32 = 2.0**-149
_OUT_SCALES = f"a number > 0, a 0-d float32 tensor on x's device, or {BLOCKS!r}"


def checked(x: Tensor, weight: Tensor, asked: Scaled | EightBits, weight2: Tensor | None = None) -> EightBits:
    """What a call gives beside these tensors, with scales of one axis at most; `weight2`: of a pair of products.

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
    rows = _scale("x_scale", x_scale, x, x.shape[:-1])
    count = weight.shape[0] * (1 if weight2 is None else 2)
    columns = _scale("weight_scale", weight_scale, x, torch.Size([count]))
    return EightBits(rows, columns, out_dtype, accumulate, _out_scale(out_scale, out_dtype, x))


def memory_of_blocks(out_scale: OutScale, x: Tensor, weight: Tensor) -> OutScale:
    """`[ceil(N / 128), M]` for the scales of a result's blocks in place of `BLOCKS`; of unchecked arguments, too."""
    if not isinstance(out_scale, str) or out_scale != BLOCKS:
        return out_scale
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() == 0 or weight.dim() != 2:
        return out_scale
    shape = (-(-weight.shape[0] // _BLOCK), math.prod(x.shape[:-1]))
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
    blocks, rows = scale.shape
    parts = torch.nn.functional.pad(wide.reshape(rows, y.shape[-1]), (0, blocks * _BLOCK - y.shape[-1]))
    parts = parts.view(rows, blocks, _BLOCK)
    found = parts.abs().amax(-1).clamp(min=2.0**-100) / wide.new_full((), largest)
    scale.copy_(found.t())
    whole = (parts / found[..., None]).clamp(-largest, largest).to(E4M3)
    return whole.view(rows, blocks * _BLOCK)[:, : y.shape[-1]].contiguous().view(y.shape)


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


def _scale(name: str, scale: object, x: Tensor, lead: torch.Size) -> Tensor:
    """A scale as calls have it: 0-d, or a vector. `lead`: the axes of the rows, each of which may have a number."""
    count = math.prod(lead)
    shapes = [[], [count]] if len(lead) == 1 else [[], [count], [*lead]]
    of_torch = [count, 1] if name == "x_scale" else [1, count]
    shapes.append(of_torch)
    if scale is None:
        raise RuntimeError(
            f"{name}: got None with an x of {x.dtype}; accepted is a float32 tensor {_either(shapes)}"
        )
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: got {type(scale).__name__}; accepted is a float32 tensor {_either(shapes)}")
    checks.strided(name, scale)
    if scale.dtype is not torch.float32:
        raise RuntimeError(f"{name}: got dtype {scale.dtype}; accepted is torch.float32")
    checks.require_device(name, scale, x)
    shape = [*scale.shape]
    if shape == []:
        return scale
    if shape not in shapes and shape != [*lead, 1]:
        blocks = "; scales of blocks are not supported" if scale.dim() > 1 else ""
        raise RuntimeError(
            f"{name}: got shape {shape}; accepted is {_either(shapes)}, one number for the tensor or one for each row"
            f"{blocks}"
        )
    return scale if scale.dim() == 1 and scale.is_contiguous() else scale.reshape(-1).contiguous()


def _either(shapes: list[list[int]]) -> str:
    # Only for an error: Dynamo traces no text of a list of symbols.
    return " or ".join(map(str, shapes))
