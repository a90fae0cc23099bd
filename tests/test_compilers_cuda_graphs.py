"""Whether a CUDA graph is being captured: on the device that is asked about."""

from __future__ import annotations

import pytest
import torch

from epigemm.compilers import capturing


@pytest.mark.gpu
def test_during_a_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(8, device=device)
    assert not capturing(device)
    graph = torch.cuda.CUDAGraph()
    seen = []
    with torch.cuda.graph(graph):
        seen += [capturing(device), capturing(torch.device("cpu"))]
        y = x + 1
    assert seen == [True, False] and not capturing(device)
    graph.replay()
    assert torch.equal(y, torch.full_like(x, 2.0))


@pytest.mark.gpu
def test_another_device_does_not_capture() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: only one CUDA device")
    x = torch.ones(8, device="cuda:0")
    seen = []
    with torch.cuda.device(0), torch.cuda.graph(torch.cuda.CUDAGraph()):
        seen += [capturing(torch.device("cuda", index)) for index in range(2)]
        x + 1
    assert seen == [True, False] and torch.cuda.current_device() == 0
