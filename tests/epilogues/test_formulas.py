"""Built-in epilogues that read a matrix find the kernels of the package. Their values: tests/ops."""

from __future__ import annotations

import pytest

from epigemm.epilogues.formulas import FORMULAS, PRELINKED, digest, prelinked_name
from epigemm.epilogues.tracer.source import functor_text


@pytest.mark.parametrize("name", FORMULAS)
def test_the_builds_kernels_are_found_by_what_they_compute(name: str) -> None:
    formula = FORMULAS[name]
    found = prelinked_name(digest(functor_text(formula.program, formula.kinds), formula.kinds))
    assert found == (name if name in PRELINKED else "")
    other = prelinked_name(digest(functor_text(formula.program, formula.kinds) + " ", formula.kinds))
    assert other == ""
