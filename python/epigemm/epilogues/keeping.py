"""Epilogues that also give what their derivative reads: the product, with the bias that is added to it.

A GEMM may store it beside the result (`epigemm.calls.stores`). The built-in functors give one value. So theirs are
programs here, linked when a call first records gradients.
"""

from __future__ import annotations

import functools
import weakref

from epigemm.epilogues.declaring import OperandSpec, Traced, made
from epigemm.epilogues.kinds import PER_COLUMN, SCALAR
from epigemm.epilogues.registry import Epilogue
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.epilogues.tracing.program import REAL, Program, Ref, Step

_Steps = tuple[tuple[str, ...], ...]
_BUILT_IN: dict[str, tuple[str, _Steps]] = {
    # the scalar, and the steps: a result's name, the primitive, and its inputs' names
    "bias_gelu": ("", (("d", "gelu", "z"),)),
    "bias_gelu_tanh": ("", (("d", "gelu_tanh", "z"),)),
    "bias_silu": ("", (("s", "sigmoid", "z"), ("d", "mul", "z", "s"))),
    "bias_tanh": ("", (("d", "tanh", "z"),)),
    "sigmoid_scale_residual": (
        "scale",
        (("s", "sigmoid", "z"), ("t", "mul", "scale", "s"), ("d", "add", "z", "t")),
    ),
    "relu_div": ("divisor", (("r", "relu", "z"), ("d", "div", "r", "divisor"))),
}


def keeping(epilogue: Epilogue, *, has_bias: bool) -> LinkedEpilogue | None:
    """The epilogue with the product as its second value; None where it is none of the product and the bias alone.

    `has_bias`: of a built-in one, whether the call gives the bias; the result has no such operand otherwise.
    """
    if isinstance(epilogue, LinkedEpilogue):
        return _of_linked(epilogue)
    return _of_built_in(epilogue.name, has_bias) if epilogue.name in _BUILT_IN else None


_linked: weakref.WeakKeyDictionary[LinkedEpilogue, LinkedEpilogue] = weakref.WeakKeyDictionary()


def _of_linked(epilogue: LinkedEpilogue) -> LinkedEpilogue:
    found = _linked.get(epilogue)
    if found is None:
        folded = [operand.folded for operand in epilogue.operands[1:]]
        traced = _with_product(epilogue.traced, epilogue.bias_place)
        shared = [operand.shared for operand in epilogue.operands[1:]]
        found = _linked[epilogue] = LinkedEpilogue(traced, folded, shared)
    return found


def _with_product(traced: Traced, bias: int | None) -> Traced:
    """The function with the product as its second value; `bias`: the operand that is added to it, or none."""
    count = traced.program.operands
    steps = () if bias is None else (Step("add", (Ref(0), Ref(bias)), REAL, ""),)
    product = Program(count, steps, Ref(count + 1) if steps else Ref(0))
    name = f"{traced.name}_with_product"
    return made(name, traced.operands, traced.program, stored=product)


@functools.cache
def _of_built_in(name: str, has_bias: bool) -> LinkedEpilogue:
    scalar, steps = _BUILT_IN[name]
    operands = [OperandSpec(PER_COLUMN, "bias")] if has_bias else []
    operands += [OperandSpec(SCALAR, scalar)] if scalar else []
    places = {each: place for place, each in enumerate(("acc", *(spec.name for spec in operands)))}
    if has_bias:
        steps = (("z", "add", "acc", "bias"), *steps)
    else:
        places["z"] = places["acc"]
    program: list[Step] = []
    for result, op, *inputs in steps:
        program.append(Step(op, tuple(Ref(places[each]) for each in inputs), REAL, ""))
        places[result] = len(operands) + len(program)
    whole = Program(len(operands), tuple(program), Ref(len(operands) + len(program)))
    traced = made(name, tuple(operands), whole)
    return LinkedEpilogue(
        _with_product(traced, 1 if has_bias else None), [spec.kind == SCALAR for spec in operands]
    )
