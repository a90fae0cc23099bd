"""Random expressions: the functor under g++ against its reference and against the function, and its derivatives.

No tolerance is guessed: `tests.support.enclosures` says what each expression may give, whatever its last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import Matrix, PerColumn, Scalar
from tests.support.enclosures import enclosure, slopes_and_spread
from tests.support.functors import COMPILER, Functors
from tests.support.thorough import a_third_of

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
        lambda x: x.half().to(x.dtype),
        lambda x: F.leaky_relu(x, 0.125),
        torch.erf,
    ),
    *(
        lambda x: 2.0**x,
        lambda x: (-1.25) ** torch.floor(x),
        lambda x: torch.abs(x) ** 0.7,
        lambda x: x**2.0 - x**3.0 * 0.25,
        lambda x: x % 1.5,
        lambda x: 2.5 % (torch.abs(x) + 0.5),
        lambda x: x // 0.75,
        lambda x: -1.5 // (torch.abs(x) + 0.5),
        lambda x: x.nan_to_num(),
        lambda x: x.half().nan_to_num(0.25).to(x.dtype),
    ),
    *(
        lambda x: 1.5 - x,
        lambda x: -0.75 / (1.0 + x * x),
        lambda x: (x.half() == 0.1).to(x.dtype),
        lambda x: torch.where(x.bfloat16() >= 0.3, x, 0.3),
        lambda x: torch.where(x.half() % 0.3 < 0.1, x, -1.0),
        lambda x: F.hardswish(x.half()).to(x.dtype),
    ),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, torch.maximum, torch.fmin, torch.logaddexp),
    *(
        lambda a, b: a / (1.0 + b * b),
        lambda a, b: torch.where(a > b, a, b * 0.5),
        lambda a, b: torch.lerp(a, b, 0.25),
        lambda a, b: a % (torch.abs(b) + 0.5),
        lambda a, b: a // (torch.abs(b) + 0.25),
        lambda a, b: (torch.abs(a) + 0.25) ** b,
        lambda a, b: torch.where(a.half() <= b.half(), a, -b),
        lambda a, b: torch.where(a == b, a * 0.25, b),
    ),
]
Expression = Callable[[Any, Any, Any, Any], Any]


def _leaf(place: int) -> Expression:
    return lambda *given: given[place]


def _unary(function: Callable[[Any], Any], inner: Expression) -> Expression:
    return lambda *given: function(inner(*given))


def _binary(function: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    return lambda *given: function(left(*given), right(*given))


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """A tree of one to four leaves; about every other node has a function of one argument on top."""

    def perhaps_in_a_function(expression: Expression) -> Expression:
        function = draw(st.sampled_from([*UNARY, *[None] * len(UNARY)]))
        return expression if function is None else _unary(function, expression)

    def leaf() -> Expression:
        return perhaps_in_a_function(_leaf(draw(st.sampled_from([0, 0, 1, 2]))))

    parts = [leaf() for _ in range(draw(st.sampled_from([1, 2, 2, 3, 3, 4])))]
    while len(parts) > 1:
        pair = parts.pop(draw(st.sampled_from(range(len(parts))))), parts.pop()
        parts.append(perhaps_in_a_function(_binary(draw(st.sampled_from(BINARY)), *pair)))
    if draw(st.sampled_from([False, False, False, True])):
        return _binary(torch.mul, parts[0], lambda *given: given[0] * 0.0 + given[3])
    return parts[0]


COUNT = a_third_of(150)
SEED = 15
ROWS, COLUMNS = 8, 16
INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, 3.0, -3.0, 0.5, 20.5, -104.0, 1e-6, INF, -INF, NAN, NAN, 7.25]


@pytest.fixture(scope="module")
def trees() -> dict[str, tuple[Traced, Expression]]:
    found: dict[str, tuple[Traced, Expression]] = {}

    @seed(SEED)
    @settings(
        max_examples=COUNT,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(expressions())
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


def points(number: int) -> list[Tensor]:
    """Accumulator, column, matrix and scalar as fp64 tensors of fp32 numbers.

    Some rows have special values: of the accumulator, of the matrix, of both, and the same in both.
    """
    generator = torch.Generator().manual_seed(number)
    acc = 2 * torch.randn(ROWS, COLUMNS, generator=generator)
    column = torch.randn(COLUMNS, generator=generator)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator)
    special = torch.tensor(SPECIAL)
    acc[0], matrix[1], acc[2], matrix[2] = special, special, special, special.roll(5)
    matrix[3] = acc[3]
    column[3] = NAN
    return [value.double() for value in (acc, column, matrix, torch.tensor(0.7))]


def differences(found: dict[str, Tensor], inputs: list[Tensor], low: Tensor, high: Tensor) -> str:
    """Where each of `found`, a mask of what is wrong, has a point: the first of them."""
    lines = []
    for label, wrong in found.items():
        for place in wrong.flatten().nonzero().flatten().tolist()[:3]:
            given = [float(one.flatten()[place]) for one in inputs]
            ends = float(low.flatten()[place]), float(high.flatten()[place])
            lines.append(f"{label} at {given}: expected from {ends[0]!r} to {ends[1]!r}")
    return "\n".join(lines)


@needs_compiler
@pytest.mark.slow
def test_random_expressions(trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors) -> None:
    """Functor, reference and the function itself, in fp32 and fp64."""
    inputs = points(5)
    wide = [value.expand(ROWS, COLUMNS) for value in inputs]
    for dtype, sharp in ((torch.float32, 1e-4), (torch.float64, 1e-13)):
        told = 0.0
        for name, (traced, expression) in trees.items():
            given = [value.to(dtype) for value in inputs]
            results = {
                "functor": tree_functors.values(name, *given),
                "reference": traced.reference(*given),
                "function": expression(*given) + given[0] * 0.5,
            }
            assert all(result.dtype == dtype for result in results.values())
            within = enclosure(traced.program, wide, dtype)
            wrong = {label: ~within.has(result) for label, result in results.items()}
            if dtype == torch.float32:  # where torch's vectorised gelu gives NaN at infinity
                infinite = torch.stack(wide).isinf().any(0)
                wrong["reference"] &= ~infinite
                wrong["function"] &= ~infinite
            text = differences(wrong, wide, within.low, within.high)
            assert not text, f"{name}, {dtype}: {text}\n{traced.source}"
            told += float(within.is_sharp(sharp).double().mean())
        assert told >= 0.9 * len(trees)  # what is allowed is next to nothing, but for a few points


@needs_compiler
@pytest.mark.slow
def test_derivatives_of_random_expressions(
    trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors
) -> None:
    generator = torch.Generator().manual_seed(6)
    # One gradient for every element: the operands are broadcast first.
    wide = [
        torch.randn(shape, generator=generator, dtype=torch.float64).expand(ROWS, COLUMNS).contiguous()
        for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS), ())
    ]
    told = 0.0
    learning = {name: traced for name, (traced, _) in trees.items() if traced.program.has_derivative}
    for name, traced in learning.items():
        for which, (expected, bound) in enumerate(
            zip(*slopes_and_spread(traced, wide, generator), strict=True)
        ):
            actual = tree_functors.slopes(name, which, *wide)
            same = (actual == expected) | (actual.isnan() & expected.isnan())
            wrong = ~same & ~((actual - expected).abs() <= bound)
            text = differences({"slope": wrong}, [*wide, actual], expected - bound, expected + bound)
            assert not text, f"{name}, by {which}: {text}\n{traced.source}"
            told += float((bound <= 1e-11 * expected.abs().clamp(min=1.0)).double().mean()) / len(wide)
    assert told >= 0.9 * len(learning)
