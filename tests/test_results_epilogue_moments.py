"""Functions with several results whose variances follow from moments of the product's columns, on a pretended GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn, ResultsEpilogue
from epigemm.calls import entry, moments
from epigemm.calls.moments import Moments
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.tracing.results import AMAX, VAR
from epigemm.planning import dry_runs
from tests.support.results import (
    assert_results,
    draw,
    gelu_and_product,
    left_to_pytorch,
    statistics,
    wanted,
)
from tests.support.stage import Stage

HALVES = (torch.float16, torch.bfloat16)


@epigemm.epilogue
def alone(acc: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(acc, 0)


@epigemm.epilogue
def of_the_product(acc: Tensor) -> tuple[Tensor, ...]:
    return acc, *torch.var_mean(acc, 0, correction=0), acc.var(0, correction=2.5), acc.var(0, keepdim=True)


@epigemm.epilogue
def beside_others(z: Tensor) -> tuple[Tensor, ...]:
    return z, z.sum(0), z.var(0), z.var(1), (z * z).sum(0), z.float()


@epigemm.epilogue
def of_a_further_matrix(z: Tensor) -> tuple[Tensor, ...]:
    y = torch.sigmoid(z)
    return z, y, torch.tanh(z), y.var(0), y.var(0, correction=0), z.var(0)


@epigemm.epilogue
def along_both(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
    z = acc + bias
    of_columns = z.sum(0), z.mean(0, keepdim=True), z.var(0, correction=0)
    return z, *of_columns, z.sum(1), z.mean(1), *torch.var_mean(z, 1), z.var(1, keepdim=True, correction=2.5)


@epigemm.epilogue
def of_rows(acc: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return torch.var_mean(acc, 1, correction=0), acc.sum(1, keepdim=True)


@epigemm.epilogue
def sums(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
    z = acc + bias
    return z, z.sum(0), z.mean(0), z.amax(0), z.sum(1)


FUNCTIONS = (statistics, alone, of_the_product, beside_others, along_both, of_rows, sums)
NAMES = [function.traced.name for function in FUNCTIONS]


@pytest.fixture
def asked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the epilogues of calls with moments, of which the plain ones are made."""
    found: list[int] = []

    def ask(*arguments: Any) -> Any:
        number, x, weight, given = arguments[:4]
        found.append(number)
        reason = entry.sees(x, weight, *(each for each in given if isinstance(each, Tensor)))
        if reason is not None:
            return int(reason)
        circumstances = arguments[11] | dry_runs.ROUTED
        return stage.module.linear_with_moments(*arguments[:11], circumstances, *arguments[12:])

    monkeypatch.setattr(entry, "ask_with_moments", ask)
    return found


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    return left_to_pytorch(monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lead", [(37,), (2, 3, 5), (3,)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_values(
    function: ResultsEpilogue,
    lead: tuple[int, ...],
    dtype: torch.dtype,
    stage: Stage,
    asked: list[int],
    left: list[tuple[str, int]],
    rng: torch.Generator,
) -> None:
    """One call gives the product and all variances of its columns, and further reductions if its kernel does."""
    given = draw(function, rng, dtype, lead=lead)
    want = wanted(function, given.product, given.operands)
    for stage.module.is_within in (False, True):
        found = function(given.x, given.weight, *given.operands)
        assert_results(function, found, want, dtype, (*lead, 24))
    assert len(asked) == 2 and (VAR, 0) not in left


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("function", [along_both, of_rows, sums], ids=lambda each: str(each.traced.name))
def test_what_is_left_to_pytorch(
    function: ResultsEpilogue,
    is_within: bool,
    stage: Stage,
    asked: list[int],
    left: list[tuple[str, int]],
    rng: torch.Generator,
) -> None:
    """Extremes alone, if the product's kernel reduces; else all but what follows from columns with variances."""
    stage.module.is_within = is_within
    given = draw(function, rng, torch.bfloat16, lead=(2, 9))
    found = function(given.x, given.weight, *given.operands)
    assert_results(
        function, found, wanted(function, given.product, given.operands), torch.bfloat16, (2, 9, 24)
    )
    every = [(each.kind, each.axis) for each in function.parts(torch.bfloat16).reductions]
    behind = [each for each in every if each[1] == 1 or function is sums]
    assert len(asked) == 1 and left == ([each for each in every if each[0] == AMAX] if is_within else behind)
    assert (AMAX, 0) in every or function is not sums


def test_a_bias_alone_is_the_built_in_epilogue(asked: list[int], rng: torch.Generator) -> None:
    """Its kernels need no linking, and PyTorch's GEMM adds it. A bias in fp32 is added in fp32."""
    given = draw(sums, rng, torch.bfloat16)
    sums(given.x, given.weight, *given.operands)
    of_the_product(given.x, given.weight)
    sums(given.x, given.weight, given.operands[0].float())
    assert asked[:2] == [BIAS.number] * 2 and asked[2] != BIAS.number


def test_results_are_tensors_of_their_own(asked: list[int], rng: torch.Generator) -> None:
    given = draw(of_the_product, rng, torch.bfloat16)
    results = of_the_product(given.x, given.weight)
    before = [each.clone() for each in results]
    for number, each in enumerate(results):
        each.add_(1)
        assert all(
            torch.equal(one, other)
            for one, other in zip(results[number + 1 :], before[number + 1 :], strict=True)
        )
    assert asked


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_without_a_degree_of_freedom(
    rows: int, asked: list[int], left: list[tuple[str, int]], rng: torch.Generator
) -> None:
    """PyTorch warns, and divides by 0; other variances of the same matrix follow from its moments."""
    given = draw(of_the_product, rng, torch.bfloat16, lead=(rows,))
    with pytest.warns(UserWarning, match="degrees of freedom"):
        found = of_the_product(given.x, given.weight)
    assert found[3].isnan().all() if rows < 2 else found[3].isinf().all()
    assert left == [(VAR, 0)] * (3 - rows) and len(asked) == (rows > 0)


def test_other_calls_are_made_as_before(
    asked: list[int], left: list[tuple[str, int]], rng: torch.Generator
) -> None:
    """Functions without such a variance, and fp64."""
    given = draw(gelu_and_product, rng, torch.bfloat16)
    gelu_and_product(given.x, given.weight, *given.operands)
    given = draw(alone, rng, torch.float64)
    alone(given.x, given.weight, *given.operands)
    assert not asked and left == [(VAR, 0)]
    with pytest.raises(ValueError, match="precision: got 'fast'"):
        alone(given.x, given.weight, *given.operands, precision="fast")


def test_a_recorded_call_keeps_its_gradients(
    asked: list[int], left: list[tuple[str, int]], rng: torch.Generator
) -> None:
    given = draw(alone, rng, torch.bfloat16)
    leaves = given.leaves()
    variance, mean = alone(given.x, given.weight, *given.operands)
    (variance.sum() + mean.sum()).backward()
    assert all(each.grad is not None for each in leaves) and left == [(VAR, 0)]
    with torch.no_grad():
        alone(given.x, given.weight, *given.operands)
    assert left == [(VAR, 0)]


@pytest.mark.parametrize("transform", ["vmap", "compile"])
def test_transforms(
    transform: str, asked: list[int], left: list[tuple[str, int]], rng: torch.Generator
) -> None:
    given = draw(alone, rng, torch.bfloat16, lead=(2, 5))

    def call(x: Tensor) -> Any:
        return alone(x, given.weight, *given.operands)

    torch._dynamo.reset()
    other = torch.vmap(call) if transform == "vmap" else torch.compile(call, fullgraph=True, backend="eager")
    got = other(given.x)
    each = [call(x) for x in given.x] if transform == "vmap" else [call(given.x)]
    want = [torch.stack(many) if transform == "vmap" else many[0] for many in zip(*each, strict=True)]
    torch.testing.assert_close(list(got), want, rtol=1e-5, atol=1e-5)
    assert left[0] == (VAR, 0)


def test_autocast(asked: list[int], left: list[tuple[str, int]], rng: torch.Generator) -> None:
    given = draw(alone, rng, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = alone(given.x, given.weight, *given.operands)
    assert_results(alone, got, wanted(alone, given.product, given.operands), torch.bfloat16, (37, 24))
    assert asked == [BIAS.number] and not left


@pytest.mark.parametrize("form", ["linear", "elementwise"])
def test_matrices_that_other_kernels_store(
    form: str,
    asked: list[int],
    left: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    rng: torch.Generator,
) -> None:
    """Further matrices, and those of a call without a product, are read once for all their variances."""
    read: list[Tensor] = []

    def column_moments(matrix: Tensor) -> Moments:
        read.append(matrix)
        variance, mean = torch.var_mean(matrix.double(), 0, correction=0)
        return Moments(mean.float(), variance.float())

    monkeypatch.setattr(moments, "column_moments", column_moments)
    given = draw(of_a_further_matrix, rng, torch.bfloat16, lead=(2, 9))
    z = given.product.bfloat16()
    if form == "linear":
        got = of_a_further_matrix(given.x, given.weight, *given.operands)
    else:
        got = of_a_further_matrix.elementwise(z, *given.operands)
    acc = given.product if form == "linear" else z
    assert_results(
        of_a_further_matrix, got, wanted(of_a_further_matrix, acc, given.operands), torch.bfloat16, (18, 24)
    )
    assert [each.shape for each in read] == [(18, 24)] * (1 if form == "linear" else 2) and not left
    assert len(asked) == (form == "linear")
