"""Products of 8-bit numbers that no fused kernel computes: `torch._scaled_mm` where it runs, else a product in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import eight_bits as _arguments
from epigemm.arguments import precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall, blocks_of
from epigemm.arguments.precision import FAST
from epigemm.calls import elementwise_kernels
from epigemm.calls.layouts import unflattened

_scaled_mm: Any = torch._scaled_mm
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16  # of N; K is one


def runs_scaled_mm(call: LinearCall) -> bool:
    """Whether `torch._scaled_mm` computes the product of a call."""
    x, weight, about = call.x, call.weight, call.eight_bits
    if about is None or not x.is_cuda or call.is_empty or weight.shape[0] % _MULTIPLE:
        return False
    is_of_rows = about.x_scale.dim() or about.weight_scale.dim()  # type: ignore[union-attr]
    if is_of_rows and about.out_dtype is not torch.bfloat16:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY


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
        return [
            "torch GEMM of x and weight times their scales, in fp32",
            *[f"PyTorch reference, {e}" for e in behind],
        ]
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
    if x_scale.dim() or weight_scale.dim():
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
    assert about is not None and about.x_scale is not None and about.weight_scale is not None
    # Not the numbers, the sums are multiplied, as in the kernels: no product is lost that is in range.
    device_type = call.x.device.type
    with precision.switched(device_type, precision.IEEE), torch.autocast(device_type, enabled=False):
        product = torch.nn.functional.linear(_rows(call).float(), call.weight.float())
    scales = about.x_scale.reshape(-1, 1) if about.x_scale.dim() else about.x_scale
    product = unflattened(product * scales * about.weight_scale, _shape(call))
    return call.epilogue.reference(product, call.operands).to(about.out_dtype)
