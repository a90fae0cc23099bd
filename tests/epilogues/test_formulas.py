"""Built-in epilogues that read a matrix: their programs compute the formula, and find the kernels of the package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.formulas import ACTIVATIONS, FORMULAS, PRELINKED, digest, prelinked_name
from epigemm.epilogues.kinds import Operand
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import EPILOGUES, typed
from epigemm.epilogues.tracer.source import functor_text
from tests.support.activations import ACT

EXPECTED: dict[str, Callable[..., Tensor]] = {
    "residual": lambda z, residual: z + residual,
    "layer_scale_residual": lambda z, layer_scale, residual: residual + layer_scale * z,
    "scale_relu": lambda z, multiplier, offset: torch.relu(multiplier * z + offset),
    **{f"gated_{name}": lambda z, gate, act=act: act(z) * gate for name, act in ACT.items()},
    **{f"gated_{name}_bias2": lambda z, b, gate, act=act: act(z) * (gate + b) for name, act in ACT.items()},
}


def test_each_is_there() -> None:
    assert set(ACT) == set(ACTIVATIONS)
    assert set(FORMULAS) == {*EXPECTED, *EPILOGUES} and set(FUNCTIONS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_program_computes_its_formula(name: str, has_bias: bool) -> None:
    acc = torch.randn(6, 9, dtype=torch.float64)
    shapes = {"per_column": (9,), "matrix": (6, 9)}
    bias, *others = (torch.randn(shapes[kind], dtype=torch.float64) for kind in FORMULAS[name].kinds)
    assert FORMULAS[name].operands[0] == Operand("per_column", "bias", is_optional=True)
    epilogue = typed(FUNCTIONS[name], [False] * (1 + len(others)))
    found = epilogue.reference(acc, [bias if has_bias else None, *others])
    torch.testing.assert_close(found, EXPECTED[name](acc + bias if has_bias else acc, *others))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_builds_kernels_are_found_by_what_they_compute(name: str) -> None:
    formula = FORMULAS[name]
    found = prelinked_name(digest(functor_text(formula.program, formula.kinds), formula.kinds))
    assert found == (name if name in PRELINKED else "")
    other = prelinked_name(digest(functor_text(formula.program, formula.kinds) + " ", formula.kinds))
    assert other == ""
