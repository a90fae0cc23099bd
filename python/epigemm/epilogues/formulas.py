"""Built-in epilogues that read a matrix, or more than one folded vector: programs like those that a trace makes.

    residual: D = z + residual                      gated_ACT: D = ACT(z) * gate
    gated_ACT_bias2: D = ACT(z) * (gate + bias2[n])
    layer_scale_residual: D = residual + layer_scale[n] * z,  scale_relu: D = relu(multiplier[n] * z + offset[n])

z is the accumulator; with `bias_` before the name it is acc + bias[n]. The gate may be a second product of x, whose
bias is bias2. Everything else is as for a user's function. The build links those of `PRELINKED`
(build_backend/prelink.py), so this module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from epigemm.epilogues.kinds import MATRIX, PER_COLUMN
from epigemm.epilogues.tracing.program import REAL, Program, Ref, Step
from epigemm.epilogues.tracing.source import functor_text

PRELINKED = ("residual", "bias_residual")
ACTIVATIONS = ("gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu", "tanh")
"""Applied to the accumulator before it is multiplied by the gate; identity: none."""
GATED, BIAS2, OF_VECTORS = "gated_", "_bias2", "scale_relu"


class NamedProgram(NamedTuple):
    """A program with its name."""

    operands: tuple[tuple[str, str], ...]  # kind and name of each
    program: Program  # its steps

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operands' kinds."""
        return tuple(kind for kind, _ in self.operands)


def _formula(operands: dict[str, str], *steps: tuple[str, ...]) -> NamedProgram:
    """A formula of steps (result, primitive, inputs...), given by names. The last step's result is returned."""
    places = {name: place for place, name in enumerate(("acc", *operands))}
    program = []
    for result, op, *inputs in steps:
        program.append(Step(op, tuple(Ref(places[name]) for name in inputs), REAL, ""))
        places[result] = len(places)
    kinds = tuple((kind, name) for name, kind in operands.items())
    return NamedProgram(kinds, Program(len(operands), tuple(program), Ref(places[steps[-1][0]])))


def _both(name: str, operands: dict[str, str], *steps: tuple[str, ...]) -> Iterator[tuple[str, NamedProgram]]:
    """The formula with a bias and without one; the steps begin with z."""
    yield (
        f"bias_{name}",
        _formula({"bias": PER_COLUMN, **operands}, ("z", "add", "acc", "bias"), *steps),
    )
    without = [tuple("acc" if word == "z" else word for word in step) for step in steps]
    yield name, _formula(operands, *without)


def _all() -> Iterator[tuple[str, NamedProgram]]:
    yield from _both("residual", {"residual": MATRIX}, ("d", "add", "z", "residual"))
    yield from _both(
        "layer_scale_residual",
        {"layer_scale": PER_COLUMN, "residual": MATRIX},
        ("scaled", "mul", "z", "layer_scale"),
        ("d", "add", "residual", "scaled"),
    )
    for activation in ACTIVATIONS:
        steps: list[tuple[str, ...]] = [("a", activation, "z")]
        if activation == "silu":
            steps = [("s", "sigmoid", "z"), ("a", "mul", "z", "s")]
        product: tuple[str, ...] = ("d", "mul", "a", "gate")
        if activation == "identity":
            steps, product = [], ("d", "mul", "z", "gate")
        yield from _both(f"{GATED}{activation}", {"gate": MATRIX}, *steps, product)
        with_bias2 = [("g", "add", "gate", "bias2"), (*product[:3], "g")]
        operands = {"bias2": PER_COLUMN, "gate": MATRIX}
        yield from _both(f"{GATED}{activation}{BIAS2}", operands, *steps, *with_bias2)
    yield from _both(
        OF_VECTORS,
        {"multiplier": PER_COLUMN, "offset": PER_COLUMN},
        ("scaled", "mul", "multiplier", "z"),
        ("sum", "add", "scaled", "offset"),
        ("d", "relu", "sum"),
    )


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
