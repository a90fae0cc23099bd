"""The steps of a functor as a graph of PyTorch operators, for gradients of any order and for the fallback.

Each function takes and returns 0-d or broadcastable tensors of one floating-point type, and has torch's derivative at
kinks. No intermediate value is infinite if the result is finite, because a gradient through it would be NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.epilogues.tracer.program import BOOL, Program, Ref, Value
from epigemm.epilogues.tracer.steps import ROUNDED


def leaky_relu(x: Tensor, slope: Tensor) -> Tensor:
    """`x > 0 ? x : slope * x`, the slope a tensor or a number."""
    return torch.where(x > 0, x, torch.where(x > 0, 0.0, x) * slope)


def elu(x: Tensor, alpha: Any, scale: Any, input_scale: Any) -> Tensor:
    """`x < 0 ? expm1(x * input_scale) * alpha * scale : x * scale`, whose slope at 0 is that from the left."""
    if not any(isinstance(number, Tensor) for number in (alpha, scale, input_scale)):
        return torch.ops.aten.elu(x, alpha, scale, input_scale)  # type: ignore[no-any-return]
    above = x * scale
    below = torch.expm1(torch.where(x > 0, 0.0, x) * input_scale) * (alpha * scale)
    # The value, with its sign, of one expression; the slope of the other.
    at_zero = above.detach() - (below.detach() - below)
    return torch.where(x > 0, above, torch.where(x == 0, at_zero, below))


def softplus(x: Tensor, beta: Tensor, threshold: Tensor) -> Tensor:
    """`x * beta > threshold ? x : log1p(exp(x * beta)) / beta`."""
    scaled = x * beta
    above = scaled > threshold
    return torch.where(above, x, torch.log1p(torch.exp(torch.where(above, 0.0, scaled))) / beta)


def softshrink(x: Tensor, bound: Tensor) -> Tensor:
    """`x > bound ? x - bound : x < -bound ? x + bound : 0`; NaN stays NaN."""
    return torch.where(x > bound, x - bound, torch.where(x < -bound, x + bound, x * 0.0))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def floor_div(a: Tensor, b: Tensor) -> Tensor:
    """The quotient rounded down."""
    return torch.div(a, b, rounding_mode="floor")


def trunc_div(a: Tensor, b: Tensor) -> Tensor:
    """The quotient rounded to zero."""
    return torch.div(a, b, rounding_mode="trunc")


def highest(x: Tensor) -> Tensor:
    """The largest finite number of x's type."""
    return torch.full((), torch.finfo(x.dtype).max, dtype=x.dtype, device=x.device)


def clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`min(max(x, low), high)`. If x equals a bound, x is returned: zeros keep their sign. NaN stays."""
    on_bound = ((x == low) | (x == high)) & (low <= high)
    return torch.where(on_bound, x, torch.clamp(x, low, high))


def clamp_min(x: Tensor, low: Tensor) -> Tensor:
    """`max(x, low)`. If x equals the bound, x is returned. A NaN in either argument stays."""
    return torch.where(x == low, x, torch.clamp(x, min=low))


def clamp_max(x: Tensor, high: Tensor) -> Tensor:
    """`min(x, high)`. If x equals the bound, x is returned. A NaN in either argument stays."""
    return torch.where(x == high, x, torch.clamp(x, max=high))


def copy(x: Tensor) -> Tensor:
    """x itself; a rounding may follow."""
    return x


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to another type, in x's own type."""
    return x.to(dtype).to(x.dtype)


def constant(like: Tensor, value: float) -> Tensor:
    """A 0-d tensor of the accumulator's type and device; infinite for a number beyond that type, as in torch."""
    if type(value) is float and abs(value) > torch.finfo(like.dtype).max:
        return like.new_full((), value, dtype=torch.float64).to(like.dtype)
    return like.new_full((), value)


# Functions that take numbers among their arguments.
WITH_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": torch.pow,  # a graph writes an operator as -2.0 ** x, which Python reads as -(2.0 ** x)
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "leaky_relu": leaky_relu,
    "hardtanh": F.hardtanh,
    "elu": elu,
    "softplus": softplus,
    "softshrink": softshrink,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **WITH_NUMBERS,
    **{
        function.__name__: function
        for function in (gelu_tanh, floor_div, trunc_div, highest, clamp, clamp_min, clamp_max, copy)
    },
    "gelu": F.gelu,
    "detach": torch.detach,
    "i0": torch.special.i0,
}


def whole(result: Tensor, acc: Tensor) -> Tensor:
    """A new tensor of the accumulator's shape."""
    return result.expand_as(acc).clone(memory_format=torch.contiguous_format)


def reference_module(program: Program) -> fx.GraphModule:
    """The program on tensors: `module(acc, *operands)`, every operand a tensor, scalars 0-d ones; a new tensor."""
    graph = fx.Graph()
    values: list[fx.Node] = [graph.placeholder("acc")]
    values += [graph.placeholder(f"operand{number}") for number in range(program.operands)]
    acc = values[0]
    constants: dict[str, fx.Node] = {}

    def tensor(value: Value) -> fx.Node:
        if isinstance(value, Ref):
            return values[value.number]
        # The key is the text, because in a dictionary 0 equals -0 and NaN does not equal NaN.
        if repr(value) not in constants:
            if isinstance(value, bool):
                made = graph.call_method("new_full", (acc, (), value), {"dtype": torch.bool})
            else:
                made = graph.call_function(constant, (acc, value))
            constants[repr(value)] = made
        return constants[repr(value)]

    for step in program.steps:
        is_of_tensors = any(isinstance(value, Ref) for value in step.inputs)
        has_booleans = any(program.kind(value) == BOOL for value in step.inputs)
        keeps_numbers = step.op in WITH_NUMBERS and is_of_tensors and not has_booleans
        inputs = (v if keeps_numbers and not isinstance(v, Ref) else tensor(v) for v in step.inputs)
        node = graph.call_function(FUNCTIONS.get(step.op) or getattr(torch, step.op), tuple(inputs))
        if step.kind in ROUNDED:
            node = graph.call_function(round_to, (node, ROUNDED[step.kind]))
        values.append(node)
    result = tensor(program.result)
    graph.output(result if _is_whole(program) else graph.call_function(whole, (result, acc)))
    module = fx.GraphModule(torch.nn.Module(), graph, "EpilogueReference")
    module.graph.lint()
    return module


def _is_whole(program: Program) -> bool:
    """Whether the last step is known to make a new tensor of the accumulator's shape and type."""
    wholes = {0}
    for number, step in enumerate(program.steps, program.operands + 1):
        inputs = (value.number for value in step.inputs if isinstance(value, Ref))
        if step.op != "highest" and any(each in wholes for each in inputs):
            wholes.add(number)
    result = program.result
    if not isinstance(result, Ref) or result.number not in wholes or result.number <= program.operands:
        return False
    step = program.steps[result.number - program.operands - 1]
    return step.op not in ("copy", "detach") and program.kind(result) != BOOL
