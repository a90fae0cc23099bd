"""What the first derivative of a call will run, as `autograd.gradients` makes it."""

from __future__ import annotations

from epigemm.arguments.calls import ElementwiseCall, LinearCall, tensors_of
from epigemm.autograd import gradients
from epigemm.calls import elementwise_kernels

PRODUCTS = (
    "then one matrix product each for the gradients of x and weight, where asked for, at the call's precision"
)
_KERNEL = "one derivative kernel (made of the epilogue's functor)"
_REFERENCE = "the epilogue's differentiable PyTorch reference"


def backward_linear(call: LinearCall) -> str:
    """The launches of a linear function's first derivative, for the operands that require a gradient."""
    return f"{_backward_epilogue(call)}{_bias(call)}; {PRODUCTS}"


def _bias(call: LinearCall) -> str:
    """Where the derivative's kernel also gives the gradient of a bias that was added to the product."""
    is_summed = call.epilogue.is_bias_relu or gradients.keeps_product(call)
    bias = call.bias if is_summed and call.epilogue.is_compiled else None
    if bias is None or not bias.requires_grad or _learns(call):
        return ""
    columns = call.weight.shape[0]
    return "; it also sums the bias's gradient" if elementwise_kernels.sums_columns(call.x, columns) else ""


def _backward_epilogue(call: LinearCall) -> str:
    x, epilogue, operands = call.x, call.epilogue, call.operands
    if epilogue.is_bias:
        return "nothing for the epilogue: the gradient of the result is that of the product"
    if epilogue.is_bias_relu and _bias(call):
        return f"{_KERNEL} on the saved result, whose sign is the derivative of relu"
    if epilogue.is_bias_relu:
        return "torch's threshold_backward on the saved result, whose sign is the derivative of relu"
    if gradients.keeps_product(call):
        return f"{derivative(call)} on the saved product"
    if gradients.without_product(epilogue, operands):
        return f"{derivative(call)}; it reads no product, the epilogue being linear in it"
    gemm = "in 16 bits with an fp32 result" if x.element_size() == 2 else "at the call's precision"
    why = "one saved in 16 bits would be rounded ahead of the bias that is folded into the epilogue"
    if call.strict:
        why = "a strict call stays one kernel and saves none"
    return f"the product again ({gemm}), as {why}; {_REFERENCE} on it"


def derivative(call: LinearCall | ElementwiseCall) -> str:
    """What the derivative of the epilogue alone runs."""
    if not elementwise_kernels.has_native(call.x):
        return _REFERENCE
    if call.epilogue.is_compiled and _learns(call):
        return f"{_REFERENCE} (a gradient of an operand is asked for)"
    return _KERNEL


def _learns(call: LinearCall | ElementwiseCall) -> bool:
    """Whether an operand beside the bias requires a gradient."""
    others = tensors_of(call.epilogue.without_bias(call.operands))
    return any(operand.requires_grad for operand in others)
