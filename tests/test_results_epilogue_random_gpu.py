"""300 random functions with several results on a GPU, at sizes for which kernels reduce what they store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from epigemm.epilogues.tracing.results import MEAN, SUM, VAR
from tests.support.cases import fused_unavailable
from tests.support.moments import poison_free_memory
from tests.support.results import draw, left_to_pytorch
from tools.random_functions import Made, values_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = torch.device("cuda")
FIRST_SEED = 1000


@pytest.mark.parametrize("part", range(12))
def test_random_functions(part: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and the same bits twice. Some of the sums and variances come from the products' kernels."""
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    left = left_to_pytorch(monkeypatch)
    wished = of_pytorch = 0
    for seed in range(FIRST_SEED + 25 * part, FIRST_SEED + 25 * part + 25):
        try:
            values_of(seed, DEVICE)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        function: Any = Made(seed).epilogue()
        given = draw(function, rng, torch.bfloat16, DEVICE, (1537,), 264, 512)
        left.clear()
        wished += 2 * sum(result.kind in (SUM, MEAN, VAR) for result in function.results)
        runs = []
        for _ in range(2):
            poison_free_memory(DEVICE, 8)
            runs.append(tree_leaves(function(given.x, given.weight, *given.operands)))
        for one, other in zip(*runs, strict=True):
            assert torch.equal(one, other), f"seed {seed}: two runs"
        of_pytorch += sum(kind in (SUM, MEAN, VAR) for kind, _ in left)
    assert of_pytorch < wished
