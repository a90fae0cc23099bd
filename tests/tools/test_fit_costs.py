"""The functors that costs are fitted to, and the table that is made of a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm._native import build_info
from epigemm.epilogues.tracing.short import ROUNDED_TO, short_number
from epigemm.planning import dry_runs
from tools import cost_table
from tools.cost_functors import PLAIN, PRIMITIVES, random_functors, repeated
from tools.fit_costs import KERNELS


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_is_repeated(name: str) -> None:
    """Beside steps as short as a product, and with the form for 16 bits that a call of it alone has."""
    functor = repeated(name, 3)
    parts = functor.primitives
    assert parts.count(name) == 3
    assert {*parts} - {name} <= PLAIN.keys()
    for rounded_to in ROUNDED_TO.values():
        once = short_number(repeated(name, 1).epilogue.traced.program, rounded_to)
        assert short_number(functor.epilogue.traced.program, rounded_to) == once


def test_products_are_repeated() -> None:
    assert repeated("mul", 4).primitives == ["mul"] * 5


def test_random_functors() -> None:
    functors = random_functors(7, 20)
    assert [each.text for each in functors[:5]] == [each.text for each in random_functors(7, 5)]
    assert len({each.text for each in functors}) == 20
    z = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for each in functors:
        assert each.epilogue.elementwise(z, 1.01).shape == z.shape
        assert {*each.primitives} <= cost_table.read().keys()


def test_the_plans_are_there() -> None:
    """By the numbers of this build's families and tiles."""
    families = list(build_info()["families"])
    assert families == ["sm90_tma", "sm90_swap_ab", "sm90_fp16x3", "sm80_mma"]
    for kernel in KERNELS:
        if kernel.plan:
            arithmetic = dry_runs.ARITHMETICS[kernel.plan[0]]
            tiles: Any = build_info()["families"][families[kernel.plan[1]]]
            assert kernel.plan[2] < tiles["16_bits" if arithmetic == "ieee" else arithmetic]
