"""Functions with several results on a GPU: memory that held NaN, the same bits twice, and which kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import epigemm
from epigemm import ResultsEpilogue
from epigemm.linker import store
from tests.support.results import (
    FUNCTIONS,
    NAMES,
    Given,
    assert_results,
    draw,
    in_fp32,
    of_every_operand,
    wanted,
)

pytestmark = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def poison(*sizes: int) -> None:
    """Leave NaN in the memory that the allocator gives next."""
    held = [torch.full((size,), float("nan"), device="cuda") for size in sizes for _ in range(4)]
    torch.cuda.synchronize()
    del held


def call(function: ResultsEpilogue, given: Given, **options: Any) -> list[Tensor]:
    return tree_leaves(function(given.x, given.weight, *given.operands, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(1024, 512, 1024), (64, 2048, 2048), (300, 520, 1024), (1, 136, 72)], ids=str
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_poisoned_memory_and_two_runs(
    function: ResultsEpilogue, size: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    m, n, k = size
    given = draw(function, rng, dtype, "cuda", (m,), n, k)
    want = wanted(function, given.product, given.operands)
    results = []
    for _ in range(2):
        poison(m * n, m, n)
        results.append(function(given.x, given.weight, *given.operands))
        assert_results(function, results[-1], want, dtype, (m, n))
    for one, other in zip(*map(tree_leaves, results), strict=True):
        assert torch.equal(one, other) or bool(one.isnan().any())


def test_precompiled_calls_link_nothing(rng: torch.Generator) -> None:
    for function in (in_fp32, of_every_operand):
        epigemm.precompile(function, [(512, 1024, 1024)], training=True)
        assert epigemm.precompile(function, [(512, 1024, 1024)], training=True) == []
    linked = set(store.made.values)
    for function in (in_fp32, of_every_operand):
        given = draw(function, rng, torch.bfloat16, "cuda", (512,), 1024, 1024)
        results = function(given.x, given.weight, *given.operands)
        leaves = given.leaves()
        found = [each for each in call(function, given) if each.requires_grad]
        torch.autograd.grad(sum(each.sum() for each in found), leaves, allow_unused=True)  # type: ignore[arg-type]
        assert_results(
            function, results, wanted(function, given.product, given.operands), torch.bfloat16, (512, 1024)
        )
    assert set(store.made.values) == linked
