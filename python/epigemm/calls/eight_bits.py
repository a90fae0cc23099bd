"""Products of 8-bit numbers that no fused kernel computes: `torch._scaled_mm` where it runs, else a product in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import eight_bits as _arguments
from epigemm.arguments import precision
from epigemm.arguments.calls import EightBits, ElementwiseCall, LinearCall, blocks_of, is_in_blocks
from epigemm.arguments.eight_bits import BLOCK
from epigemm.arguments.precision import FAST
from epigemm.calls import elementwise_kernels
from epigemm.calls.layouts import unflattened

_scaled_mm: Any = torch._scaled_mm
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16  # of N; K is one
# Scales of blocks need Hopper, and cuBLAS of this CUDA. It reads whole 16 bytes of them: of 4 rows of x, of 4 blocks of
# K. In some versions of torch the caller fills up the latter, in others nobody does.
_HOPPER, _LEAST_CUDA = 9, (12, 9)
_MULTIPLES_IN_BLOCKS = 4, 4 * BLOCK


def runs_scaled_mm(call: LinearCall) -> bool:
    """Whether `torch._scaled_mm` computes the product of a call."""
    x, weight, about = call.x, call.weight, call.eight_bits
    if about is None or not x.is_cuda or call.is_empty or weight.shape[0] % _MULTIPLE:
        return False
    is_of_rows = about.x_scale.dim() or about.weight_scale.dim()  # type: ignore[union-attr]
    if (is_of_rows and about.out_dtype is not torch.bfloat16) or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(x.device)
    return _reads_blocks(call, capability) if is_in_blocks(about) else capability >= _LEAST_CAPABILITY


def _reads_blocks(call: LinearCall, capability: tuple[int, int]) -> bool:
    of_m, of_k = _MULTIPLES_IN_BLOCKS
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    is_whole = call.rows % of_m == 0 and call.x.shape[-1] % of_k == 0
    return is_whole and capability[0] == _HOPPER and cuda >= _LEAST_CUDA


def of_call(call: LinearCall, elementwise: Callable[[ElementwiseCall], Tensor]) -> Tensor:
    """A call whose arguments have been checked; `elementwise` makes what is behind a product."""
    about, of_wide = call.eight_bits, _of_wide(call)
    result = _behind_scaled_mm(of_wide, elementwise) if runs_scaled_mm(of_wide) else _in_fp32(of_wide)
    if about is not None and about.out_scale is not None:
        result = _arguments.quantised(result, about.out_scale)  # type: ignore[arg-type]
    return result if call.out is None else call.out.copy_(result)


def _of_wide(call: LinearCall) -> LinearCall:
    """The call whose result is quantised: blocks are those of a bf16 result, as in the kernels."""
    about = call.eight_bits
    if about is None or about.out_scale is None:
        return call
    dtype = torch.float32 if blocks_of(about.out_scale) is None else torch.bfloat16
    return call._replace(out=None, eight_bits=about._replace(out_dtype=dtype, out_scale=None))


def launches(call: LinearCall) -> list[str]:
    """What `of_call` launches, in words."""
    of_wide = _of_wide(call)
    behind = [] if of_wide is call else [f"PyTorch, quantisation to {call.dtype}"]
    return [*_launches_of_wide(of_wide), *behind]


def _launches_of_wide(call: LinearCall) -> list[str]:
    behind = [] if call.epilogue.is_bias else [call.epilogue.name]
    if not runs_scaled_mm(call):
        kernel = "torch GEMM of x and weight times their scales, in fp32"
        if call.eight_bits is not None and is_in_blocks(call.eight_bits):
            kernel = f"torch GEMM of each {BLOCK} columns of x and weight times their scales, in fp32"
        return [kernel, *[f"PyTorch reference, {e}" for e in behind]]
    if not behind and _bias_in_product(call) is call.bias:
        return ["torch GEMM (_scaled_mm)"]
    kind = "epigemm CUDA kernel" if elementwise_kernels.has_native(call.x) else "PyTorch reference"
    return ["torch GEMM (_scaled_mm)", f"{kind}, {call.epilogue.name}"]


def _rows(call: LinearCall) -> Tensor:
    return call.x.reshape(call.rows, call.x.shape[-1])


def _shape(call: LinearCall) -> tuple[int, ...]:
    return (*call.x.shape[:-1], call.weight.shape[0])


def _bias_in_product(call: LinearCall) -> Tensor | None:
    """The bias, if `_scaled_mm` adds it: to a product in 16 bits before that is rounded."""
    bias, about = call.bias, call.eight_bits
    is_added = bias is not None and about is not None and bias.dtype is about.out_dtype is not torch.float32
    return bias if is_added else None


def _behind_scaled_mm(call: LinearCall, elementwise: Callable[[ElementwiseCall], Tensor]) -> Tensor:
    about = call.eight_bits
    assert about is not None and about.x_scale is not None and about.weight_scale is not None
    x_scale, weight_scale = about.x_scale, about.weight_scale
    if is_in_blocks(about):
        x_scale, weight_scale = x_scale.t().contiguous().t(), weight_scale.contiguous().t()
    elif x_scale.dim() or weight_scale.dim():
        x_scale = x_scale.expand(call.rows).reshape(-1, 1).contiguous()
        weight_scale = weight_scale.expand(call.weight.shape[0]).reshape(1, -1).contiguous()
    bias = _bias_in_product(call)
    factors = _rows(call).contiguous(), call.weight.contiguous().t()
    product = _scaled_mm(
        *factors, x_scale, weight_scale, bias, None, about.out_dtype, use_fast_accum=about.accumulate == FAST
    )
    product = unflattened(product, _shape(call))
    if call.epilogue.is_bias and bias is call.bias:
        return product
    operands = call.operands if bias is None else call.epilogue.without_bias(call.operands)
    if any(
        isinstance(each, Tensor) and each.dtype is torch.bfloat16 is not product.dtype for each in operands
    ):
        # Of a result that is quantised: its operands have bf16's type.
        return call.epilogue.reference(product, operands).to(product.dtype)
    return elementwise(ElementwiseCall(call.epilogue, product, operands, product))


def _in_fp32(call: LinearCall) -> Tensor:
    about = call.eight_bits
    assert about is not None
    device_type = call.x.device.type
    with precision.switched(device_type, precision.IEEE), torch.autocast(device_type, enabled=False):
        product = unflattened(_product(_rows(call), call.weight, about), _shape(call))
    return call.epilogue.reference(product, call.operands).to(about.out_dtype)


def _product(x: Tensor, weight: Tensor, about: EightBits) -> Tensor:
    """The product of all, or of each block, times its scales."""
    x_scale, weight_scale, multiplied = about.x_scale, about.weight_scale, torch.nn.functional.linear
    assert x_scale is not None and weight_scale is not None
    # Not the numbers, the sums are multiplied, as in the kernels, of blocks by the product of both scales.
    if not is_in_blocks(about):
        scales = x_scale.reshape(-1, 1) if x_scale.dim() else x_scale
        return multiplied(x.float(), weight.float()) * scales * weight_scale
    total = x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    of_columns = weight_scale.repeat_interleave(BLOCK, 0)[: len(weight)]
    for number, (of_x, of_weight) in enumerate(zip(x_scale.unbind(1), of_columns.unbind(1), strict=True)):
        block = slice(number * BLOCK, (number + 1) * BLOCK)
        total += multiplied(x[:, block].float(), weight[:, block].float()) * (of_x[:, None] * of_weight)
    return total
