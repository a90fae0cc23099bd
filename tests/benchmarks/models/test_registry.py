"""Every model by name."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.registry import NETWORKS


def test_the_models_that_were_there_and_nine_more() -> None:
    first = ["bert-base", "gpt2", "vit-b16", "mixer-b16", "llama-1b", "t5-small", "dlrm", "resmlp", "mlp-16"]
    more = [
        "nerf",
        "siren",
        "tabular-resnet",
        "swin-t",
        "convnext-t",
        "opt",
        "mixtral",
        "wav2vec2",
        "segformer",
    ]
    assert list(NETWORKS) == first + more


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_and_a_large_batch(name: str) -> None:
    small, large = (torch.tensor(batch) for batch in NETWORKS[name].batches)
    assert small.prod() < large.prod()
    assert all(
        inputs.shape[0] == small[0] for inputs in NETWORKS[name].draw(torch.Generator(), *small.tolist())
    )
