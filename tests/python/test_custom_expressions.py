"""Random expressions: the functor under g++ against its reference and against the function, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epigemm.custom import Matrix, PerColumn, Scalar, Traced, trace
from tests.support.functors import COMPILER, Functors

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


# Random expressions of three operands.

UNARY: list[Callable[[Any], Any]] = [
    *(
        torch.tanh,
        torch.sigmoid,
        torch.relu,
        torch.abs,
        torch.sin,
        torch.atan,
        F.gelu,
        F.silu,
        F.softplus,
        torch.floor,
    ),
    *(
        torch.neg,
        F.hardswish,
        lambda x: torch.exp(-x * x),
        lambda x: torch.sqrt(torch.abs(x) + 1.0),
        torch.sign,
    ),
    *(
        lambda x: torch.clamp(x, -1.5, 2.0),
        lambda x: x.half().float(),
        lambda x: F.leaky_relu(x, 0.125),
        torch.erf,
    ),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, torch.maximum, torch.fmin, torch.logaddexp),
    *(
        lambda a, b: a / (1.0 + b * b),
        lambda a, b: torch.where(a > b, a, b * 0.5),
        lambda a, b: torch.lerp(a, b, 0.25),
    ),
]
Expression = Callable[[Any, Any, Any, Any], Any]


def _leaf(place: int) -> Expression:
    return lambda *given: given[place]


def _unary(function: Callable[[Any], Any], inner: Expression) -> Expression:
    return lambda *given: function(inner(*given))


def _binary(function: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    return lambda *given: function(left(*given), right(*given))


EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(
    st.sampled_from([_leaf(0), _leaf(0), _leaf(1), _leaf(2)]),
    lambda inner: (
        st.builds(_unary, st.sampled_from(UNARY), inner)
        | st.builds(_binary, st.sampled_from(BINARY), inner, inner)
        | st.builds(lambda one: _binary(torch.mul, one, lambda *given: given[0] * 0.0 + given[3]), inner)
    ),
    max_leaves=6,
)
COUNT = 300


@pytest.fixture(scope="module")
def trees() -> dict[str, tuple[Traced, Expression]]:
    found: dict[str, tuple[Traced, Expression]] = {}

    @settings(
        max_examples=COUNT, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(EXPRESSIONS)
    def collect(expression: Expression) -> None:
        def tree(acc: Tensor, column: PerColumn, matrix: Matrix, scalar: Scalar) -> Tensor:
            result = expression(acc, column, matrix, scalar) + acc * 0.5
            assert isinstance(result, Tensor)
            return result

        found[f"tree{len(found)}"] = trace(tree), expression

    collect()
    assert len(found) >= 0.9 * COUNT  # hypothesis draws no expression twice
    return found


@pytest.fixture(scope="module")
def tree_functors(
    trees: dict[str, tuple[Traced, Expression]], tmp_path_factory: pytest.TempPathFactory
) -> Functors:
    return Functors({name: one for name, (one, _) in trees.items()}, tmp_path_factory.mktemp("trees"), "-O0")


@needs_compiler
@pytest.mark.slow
def test_random_expressions(trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors) -> None:
    """Functor and reference, fp32 and fp64; and both against the function itself."""
    generator = torch.Generator().manual_seed(5)
    acc = torch.randn(8, 16, generator=generator, dtype=torch.float64) * 2
    column, matrix = (
        torch.randn(16, generator=generator).double(),
        torch.randn(8, 16, generator=generator).double(),
    )
    scalar = torch.tensor(0.7, dtype=torch.float64)
    for name, (traced, expression) in trees.items():
        for dtype in (torch.float32, torch.float64):
            given = [value.to(dtype) for value in (acc, column, matrix, scalar)]
            actual, reference = tree_functors.values(name, *given), traced.reference(*given)
            assert reference.dtype == dtype
            plain = expression(*given) + given[0] * 0.5
            # A step (floor, sign, a cast to fp16) passes on a last bit as a whole one: few elements may.
            for one, other in ((actual, reference), (reference, plain)):
                tolerance = 256 * torch.finfo(dtype).eps
                off = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
                assert off.double().mean() <= 0.02, f"{name}, {dtype}:\n{traced.source}"


@needs_compiler
@pytest.mark.slow
def test_derivatives_of_random_expressions(
    trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors
) -> None:
    generator = torch.Generator().manual_seed(6)
    shapes = ((8, 16), (16,), (8, 16), ())
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    for name, (traced, _) in trees.items():
        # One gradient for every element: the operands are broadcast first.
        wide = [value.detach().expand(8, 16).clone().requires_grad_() for value in inputs]
        result = traced.graph(wide[0], *wide[1:])
        gradients = torch.autograd.grad(result.sum(), wide, allow_unused=True)
        rounds = "to_half" in traced.source  # torch rounds a gradient through the cast, too
        for which, gradient in enumerate(gradients):
            expected = torch.zeros(8, 16, dtype=torch.float64) if gradient is None else gradient
            actual = tree_functors.slopes(name, which, *[value.detach() for value in wide])
            tolerance = 2e-2 if rounds else 1e-10
            off = ~torch.isclose(actual, expected, rtol=tolerance, atol=tolerance)
            assert off.double().mean() <= 0.02, f"{name}, {which}:\n{traced.source}"
