"""300 random functions with several results on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.moments import poison_free_memory
from tests.support.results import draw
from tools.random_functions import Made, values_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = torch.device("cuda")
FIRST_SEED = 1000


@pytest.mark.parametrize("part", range(12))
def test_random_functions(part: int, rng: torch.Generator) -> None:
    """Right, and the same bits twice."""
    for seed in range(FIRST_SEED + 25 * part, FIRST_SEED + 25 * part + 25):
        try:
            values_of(seed, DEVICE)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        function: Any = Made(seed).epilogue()
        given = draw(function, rng, torch.bfloat16, DEVICE, (1537,), 264, 512)
        runs = []
        for _ in range(2):
            poison_free_memory(DEVICE, 8)
            runs.append(tree_leaves(function(given.x, given.weight, *given.operands)))
        for one, other in zip(*runs, strict=True):
            assert torch.equal(one, other), f"seed {seed}: two runs"
