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


# Of bf16 eager on an H100 whose host takes 14 to 20 us a kernel: milliseconds of host and device at a batch.
MEASURED = {
    "bert-base": (32, 0.6, 0.375),
    "gpt2": (16, 0.5, 0.68),
    "t5-small": (64, 2.0, 0.9),
    "dlrm": (16384, 1.4, 1.7),
    "resmlp": (4096, 1.3, 1.03),
    "nerf": (65536, 1.2, 1.02),
    "tabular-resnet": (8192, 1.05, 0.455),
    "swin-t": (32, 6.7, 6.5),
    "convnext-t": (32, 7.4, 3.7),
    "opt": (8, 1.16, 0.78),
    "mixtral": (4, 3.2, 1.38),
    "segformer": (8, 4.1, 4.3),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_large_batch_keeps_the_device_busy_for_twice_the_host(name: str) -> None:
    batch, host_ms, device_ms = MEASURED[name]
    assert NETWORKS[name].batches[-1][0] / batch * device_ms >= 2 * host_ms
