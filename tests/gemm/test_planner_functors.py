"""What the planner knows of an epilogue that is made at run time: its matrices and its cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from epigemm._native import ops
from tests.gemm.query import ALL_TYPES, H200, Query

PER_COLUMN, MATRIX = 1, 4  # csrc/epilogue/operands.h
_names = (f"test_planner_functors.{number}" for number in count())
SHAPES = [(16, 4096, 4096), (300, 1000, 512), (4096, 4096, 512), (16384, 8192, 4096)]


def made(*, matrices: int = 0, of_compute: bool = False, primitives: str = "", is_short: bool = True) -> str:
    """The name of a new epilogue: of a bias and of matrices."""
    name = next(_names)
    operands = ["bias", *(f"matrix{number}" for number in range(matrices))]
    kinds = [PER_COLUMN, *[MATRIX] * matrices]
    folded = [0, *[int(of_compute)] * matrices]
    ops._register_epilogue(name, ",".join(operands), kinds, folded, 1, primitives, is_short)
    return name


def times(query: Query) -> dict[tuple[int, ...], float]:
    """The predictions, by plan; () is the fallback."""
    answer = query.plan()
    return {
        **{tuple(each["plan"]): each["predicted_us"] for each in answer["candidates"]},
        (): answer["fallback_us"],
    }


@pytest.mark.parametrize(("dtype", "arithmetic"), ALL_TYPES)
@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("primitives", "built_in"), [("", "relu_div"), ("sigmoid", "sigmoid_scale_residual")]
)
def test_the_like_of_a_built_in_is_planned_like_it(
    primitives: str, built_in: str, size: tuple[int, int, int], dtype: str, arithmetic: str
) -> None:
    m, n, k = size
    query = Query(epilogue=made(primitives=primitives), m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic)
    assert times(query) == times(replace(query, epilogue=built_in))


@pytest.mark.parametrize(("dtype", "arithmetic"), ALL_TYPES)
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_a_matrix_is_read(size: tuple[int, int, int], dtype: str, arithmetic: str) -> None:
    """Once, by whichever kernel: a plan takes longer by what reading it alone would take, and a longer epilogue."""
    m, n, k = size
    query = Query(m=m, n=n, k=k, dtype=dtype, arithmetic=arithmetic)
    none, one, two = (times(replace(query, epilogue=made(matrices=number))) for number in range(3))
    wide = times(replace(query, epilogue=made(matrices=1, of_compute=True)))
    us = m * n * (4 if dtype == "float32" else 2) / H200[3]
    for plan, time in none.items():
        # A prediction is written with six digits; sustained load, and the memory's own factor, add to a kernel's time.
        assert time < one[plan] <= 1.2 * time + 1.4 * us
        assert one[plan] < two[plan]
        assert wide[plan] == (one if dtype == "float32" else two)[plan]
    assert one[()] - none[()] == pytest.approx(us, abs=1e-5 * one[()])


def test_an_epilogue_that_takes_longer_than_it_saves_is_an_elementwise_kernel() -> None:
    """A digamma of the accurate kind behind a short K."""
    query = Query(epilogue=made(primitives="mul,digamma", is_short=False), m=131072, n=256, k=256)
    answer = query.plan()
    assert not answer["fused"]
    assert "us more within the product" in answer["why_not"]
    assert "us more in an elementwise kernel" in answer["why_not"]
    bare = replace(query, epilogue=made()).plan()
    assert "the epilogue" not in bare["why_not"]
