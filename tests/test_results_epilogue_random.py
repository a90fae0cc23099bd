"""Random functions with several results, 300 of them with `--thorough`, against the functions themselves in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue, Scalar
from epigemm.epilogues import declaring
from epigemm.epilogues.kinds import ANNOTATIONS
from tests.support.results import assert_results, draw, wanted
from tests.support.thorough import a_third

pytestmark = pytest.mark.slow

# Of numbers of about one they make numbers of about one, and none is steep: an error stays as large as it is.
UNARY: list[Callable[[Any], Any]] = [
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    torch.sin,
    torch.abs,
    F.gelu,
    F.silu,
    lambda z: torch.clamp(z, -1.5, 2.0),
    lambda z: z * 0.5,
    lambda z: -z,
    lambda z: z + 0.25,
    lambda z: torch.tanh(z) ** 2,
    lambda z: F.leaky_relu(z, 0.1),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda a, b: torch.tanh(a) * torch.sigmoid(b),
    lambda a, b: (a + b) * 0.5,
    torch.maximum,
    lambda a, b: torch.minimum(a, b),
    lambda a, b: torch.where(a.detach() * 0.0 + 1.0 > 0.5, a, b),
    lambda a, b: a - torch.sigmoid(b),
]
OPERATORS: list[Callable[..., Any]] = [*UNARY, *BINARY, *BINARY]
REDUCTIONS: list[Callable[[Any], Any]] = [
    lambda z: z.sum(0),
    lambda z: z.sum(1),
    lambda z: z.mean(0, keepdim=True),
    lambda z: z.mean(-1),
    lambda z: z.amax(0),
    lambda z: z.amin(1, keepdim=True),
    lambda z: torch.var_mean(z, 0, correction=0),
    lambda z: torch.var_mean(z, 1),
    lambda z: z.var(0, correction=0),
]


class Made:
    """A random function, in its steps."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        kinds: list[Any] = [PerColumn, PerRow, Matrix, Scalar]
        self.kinds = [kind for kind in (*kinds, PerColumn) if rng.random() < 0.6]
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        count = 1 + len(self.kinds)
        # Tensors [M, N] alone are reduced and returned: the first value is one, and so is what reads one.
        whole = [0]
        for number in range(count, count + rng.randint(1, 8)):
            first = rng.choice(whole[-3:])
            scalars = [place for place, kind in enumerate(self.kinds, 1) if kind is Scalar]
            others = [place for place in range(number) if place not in scalars]
            operator = rng.choice(OPERATORS)
            inputs: tuple[int, ...] = (first,) if operator in UNARY else (first, rng.choice(others))
            if scalars and rng.random() < 0.2:
                operator, inputs = (lambda z, s: torch.tanh(z) * s), (first, scalars[0])
            self.steps.append((operator, inputs))
            whole.append(number)
        returned = [rng.choice(whole) for _ in range(rng.randint(1, 5))]
        self.returned = [
            (place, rng.choice([None, None, *REDUCTIONS]), rng.random() < 0.2) for place in returned
        ]
        self.is_list = rng.random() < 0.3

    def __call__(self, acc: Tensor, *operands: Any) -> Any:
        values = [acc, *operands]
        for operator, inputs in self.steps:
            values.append(operator(*(values[place] for place in inputs)))
        found = []
        for place, reduction, in_fp32 in self.returned:
            value = values[place].float() if in_fp32 else values[place]
            found.append(value if reduction is None else reduction(value))
        return found if self.is_list else tuple(found)


def epilogue_of(made: Made) -> ResultsEpilogue:
    """Of a function whose operands and captured values are known: all are its own."""
    operands = tuple(
        declaring.OperandSpec(ANNOTATIONS[kind], f"operand{number}") for number, kind in enumerate(made.kinds)
    )
    found = declaring._trace(made.__call__, operands, "random", f"{__file__}:1")
    assert isinstance(found, declaring.TracedResults)
    epilogue = ResultsEpilogue(found)
    vars(epilogue)["__wrapped__"] = made.__call__
    return epilogue


@pytest.mark.parametrize("part", range(12))
def test_random_functions(part: int, device: torch.device, rng: torch.Generator) -> None:
    for seed in a_third(range(25 * part, 25 * part + 25), device):
        function: Any = epilogue_of(Made(seed))
        for dtype, lead in itertools.product(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16), [(9,), (2, 5)]
        ):
            given = draw(function, rng, dtype, device, lead, 12, 16)
            want = wanted(function, given.product, given.operands)
            got = function(given.x, given.weight, *given.operands)
            try:
                assert_results(function, got, want, dtype, (*lead, 12))
                z = given.product.to(dtype)
                got = function.elementwise(z, *given.operands)
                assert_results(function, got, wanted(function, z, given.operands), dtype, z.shape)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {dtype}: {error}") from None


@pytest.mark.parametrize("part", range(4))
def test_gradients_of_random_functions(part: int, device: torch.device, rng: torch.Generator) -> None:
    """In fp64, of every tensor: those of the function itself."""
    for seed in a_third(range(300 + 25 * part, 300 + 25 * part + 25), device):
        function: Any = epilogue_of(Made(seed))
        given = draw(function, rng, torch.float64, device, (7,), 6, 5)
        leaves = given.leaves()
        got = tree_leaves(function(given.x, given.weight, *given.operands))
        want = wanted(function, given.product, given.operands)
        pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
        assert all(a.requires_grad for a, _ in pairs)
        weights = [torch.randn(b.shape, generator=rng, dtype=torch.float64).to(device) for _, b in pairs]
        if not pairs:
            continue
        mine, others = (
            torch.autograd.grad(
                sum((pair[side] * weight).sum() for pair, weight in zip(pairs, weights, strict=True)),  # type: ignore[arg-type]
                leaves,
                allow_unused=True,
                materialize_grads=True,
            )
            for side in (0, 1)
        )
        for one, other in zip(mine, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=f"seed {seed}")
