"""Every model by name."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.registry import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_and_a_large_batch(name: str) -> None:
    small, large = (torch.tensor(batch) for batch in NETWORKS[name].batches)
    assert small.prod() < large.prod()
    assert all(
        inputs.shape[0] == small[0] for inputs in NETWORKS[name].draw(torch.Generator(), *small.tolist())
    )
