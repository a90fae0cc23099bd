"""Built-in epilogues that read a matrix find the kernels of the package. Their values: tests/ops."""

from __future__ import annotations

import pytest

from epigemm.epilogues.formulas import ACTIVATIONS, FORMULAS, PRELINKED, digest, prelinked_name
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import EPILOGUES
from epigemm.epilogues.tracer.source import functor_text
from tests.support.activations import ACT


def test_each_is_there() -> None:
    gated = {f"gated_{name}{bias}" for name in ACT for bias in ("", "_bias2")}
    assert set(ACT) == set(ACTIVATIONS)
    assert set(FUNCTIONS) == {"residual", "layer_scale_residual", "scale_relu", *gated}
    assert set(FORMULAS) == {*FUNCTIONS, *EPILOGUES}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_builds_kernels_are_found_by_what_they_compute(name: str) -> None:
    formula = FORMULAS[name]
    found = prelinked_name(digest(functor_text(formula.program, formula.kinds), formula.kinds))
    assert found == (name if name in PRELINKED else "")
    other = prelinked_name(digest(functor_text(formula.program, formula.kinds) + " ", formula.kinds))
    assert other == ""
