"""What the library's epilogues compute: programs like those that a trace makes.

z is the accumulator plus the bias, if the epilogue has one; a call may leave the bias out. The functors of some stand
in csrc/epilogue, in C++ (registry.def lists them); those of the others are generated, as a user's is.

    bias: D = z   bias_ACT: D = ACT(z)   sigmoid: D = sigmoid(acc)   relu_div: D = relu(z) / divisor
    sigmoid_scale_residual: D = z + scale sigmoid(z)   scale_batch_norm: D = multiplier[n] acc + offset[n]
    residual: D = z + residual   layer_scale_residual: D = residual + layer_scale[n] z
    gated_ACT: D = ACT(z) gate   gated_ACT_bias2: D = ACT(z) (gate + bias2[n])
    scale_relu: D = relu(multiplier[n] z + offset[n])   row_scale: D = z scale[m]

The gate may be a second product of x, whose bias is bias2. The build links those of `PRELINKED`
(build_backend/prelink.py), so this module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, PER_ROW, SCALAR, Operand
from epigemm.epilogues.tracer.program import REAL, Program, Ref, Step
from epigemm.epilogues.tracer.source import functor_text

PRELINKED = ("residual",)
ACTIVATIONS = ("gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu", "tanh")
"""Applied to the accumulator before it is multiplied by the gate; identity: none."""
GATED, BIAS2, OF_VECTORS = "gated_", "_bias2", "scale_relu"


class NamedProgram(NamedTuple):
    """A program with its name."""

    operands: tuple[Operand, ...]
    program: Program  # its steps

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operands' kinds."""
        return tuple(each.kind for each in self.operands)

    @property
    def folded(self) -> tuple[bool, ...]:
        """For each operand, whether it has the arithmetic's type; else it has x's."""
        return tuple(each.folded for each in self.operands)


def _formula(
    operands: dict[str, str], *steps: tuple[str, ...], has_bias: bool = True, is_folded: bool = False
) -> NamedProgram:
    """A formula of steps (result, primitive, inputs...), given by names. The last step's result is returned.

    `is_folded`: whether its vectors are folded from others, and have the arithmetic's type.
    """
    if has_bias:
        operands, steps = {"bias": PER_COLUMN, **operands}, (("z", "add", "acc", "bias"), *steps)
    places = {name: place for place, name in enumerate(("acc", *operands))}
    program = []
    for result, op, *inputs in steps:
        program.append(Step(op, tuple(Ref(places[name]) for name in inputs), REAL, ""))
        places[result] = len(places)
    every = (
        Operand(kind, name, is_optional=name == "bias", folded=is_folded or kind == SCALAR)
        for name, kind in operands.items()
    )
    return NamedProgram(tuple(every), Program(len(operands), tuple(program), Ref(places[steps[-1][0]])))


def _activated(activation: str, result: str = "d") -> list[tuple[str, ...]]:
    """The steps from z to its activation."""
    if activation == "silu":
        return [("s", "sigmoid", "z"), (result, "mul", "z", "s")]
    return [(result, activation, "z")]


def _all() -> Iterator[tuple[str, NamedProgram]]:
    vectors = {"multiplier": PER_COLUMN, "offset": PER_COLUMN}
    yield "bias", _formula({})
    for activation in ("relu", "gelu", "gelu_tanh", "silu", "tanh"):
        yield f"bias_{activation}", _formula({}, *_activated(activation))
    yield "sigmoid", _formula({}, ("d", "sigmoid", "acc"), has_bias=False)
    yield (
        "sigmoid_scale_residual",
        _formula(
            {"scale": SCALAR}, ("s", "sigmoid", "z"), ("t", "mul", "scale", "s"), ("d", "add", "z", "t")
        ),
    )
    yield "relu_div", _formula({"divisor": SCALAR}, ("r", "relu", "z"), ("d", "div", "r", "divisor"))
    folded = (("scaled", "mul", "multiplier", "acc"), ("d", "add", "scaled", "offset"))
    # Rounding what is folded from other vectors to 16 bits would cost accuracy for nothing.
    yield "scale_batch_norm", _formula(vectors, *folded, has_bias=False, is_folded=True)
    yield "residual", _formula({"residual": MATRIX}, ("d", "add", "z", "residual"))
    steps = (("scaled", "mul", "z", "layer_scale"), ("d", "add", "residual", "scaled"))
    yield "layer_scale_residual", _formula({"layer_scale": PER_COLUMN, "residual": MATRIX}, *steps)
    for activation in ACTIVATIONS:
        before = [] if activation == "identity" else _activated(activation, "a")
        active = "a" if before else "z"
        yield f"{GATED}{activation}", _formula({"gate": MATRIX}, *before, ("d", "mul", active, "gate"))
        gate = (("g", "add", "gate", "bias2"), ("d", "mul", active, "g"))
        operands = {"bias2": PER_COLUMN, "gate": MATRIX}
        yield f"{GATED}{activation}{BIAS2}", _formula(operands, *before, *gate)
    yield "row_scale", _formula({"scale": PER_ROW}, ("d", "mul", "z", "scale"))
    scaled = (("scaled", "mul", "multiplier", "z"), ("sum", "add", "scaled", "offset"), ("d", "relu", "sum"))
    yield OF_VECTORS, _formula(vectors, *scaled)


FORMULAS: dict[str, NamedProgram] = dict(_all())
"""By name."""


def digest(source: str, kinds: Sequence[str]) -> str:
    """The digest of an epilogue's functor and of its operands' kinds."""
    return hashlib.sha256("\n".join((source, *kinds)).encode()).hexdigest()


@functools.cache
def _prelinked() -> dict[str, str]:
    formulas = ((name, FORMULAS[name]) for name in PRELINKED)
    return {digest(functor_text(each.program, each.kinds), each.kinds): name for name, each in formulas}


def prelinked_name(of: str) -> str:
    """The name under which the package has kernels of an epilogue with this digest; empty if it has none."""
    return _prelinked().get(of, "")
