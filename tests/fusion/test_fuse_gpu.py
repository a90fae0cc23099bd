"""What of fusion is CUDA's: kernels that run, kept packs, and graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from epigemm import fusion, packs
from epigemm.fusion import FusionReport
from tests.fusion.zoo import EVERYTHING, KERNELBENCH, Example, deep_mlp
from tests.support.cases import fused_unavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KERNELBENCH.is_dir(), reason="examples are not at hand"),
]
hopper = pytest.mark.skipif(bool(fused_unavailable()), reason="no fused kernel runs here")


def to_cuda(inputs: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [i.cuda().to(dtype) if i.is_floating_point() else i.cuda() for i in inputs]


@pytest.mark.parametrize("example", EVERYTHING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_equal_outputs(example: Example, dtype: torch.dtype, training: bool) -> None:
    model = example.make().cuda().to(dtype).train(training)
    fused, plain = epigemm.fuse(copy.deepcopy(model)), copy.deepcopy(model)
    compiled: Any = torch.compile(copy.deepcopy(model), backend="epigemm", options={"backend": "aot_eager"})
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for _ in range(2):
        inputs = to_cuda(example.inputs(), dtype)
        with torch.no_grad(), fusion.watch() as unfused:
            expected = plain(*inputs)
            torch.testing.assert_close(fused(*inputs), expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(compiled(*inputs), expected, rtol=tolerance, atol=tolerance)
        assert unfused == []


@hopper
def test_weights_of_fused_layers_keep_their_packs() -> None:
    """fp32 at "highest": lone layers too run on fp16 pieces, and split their weights once."""
    model: Any = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    fused = epigemm.fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(packs.kept(layer.weight) for layer in (model[0], model[2]))
    with torch.no_grad():
        model[0].weight.mul_(2)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


@hopper
def test_compiled_graphs_keep_packs() -> None:
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append}
    compiled: Any = torch.compile(model, backend="epigemm", fullgraph=True, options=options)
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert [site.function for site in reports[0].sites] == ["linear_relu", "linear"]
    assert all(packs.kept(layer.weight) for layer in (model[0], model[2]))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"mode": "reduce-overhead"}], ids=["inductor", "cuda_graphs"])
def test_inductor(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = deep_mlp(4, 256).cuda().eval()
    compiled: Any = torch.compile(model, backend="epigemm", fullgraph=True, **settings)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(64, 256, device="cuda")
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=1e-4, atol=1e-4)


def test_fused_models_are_captured() -> None:
    model = deep_mlp(3, 128).cuda().eval()
    fused = epigemm.fuse(model)
    x = torch.randn(32, 128, device="cuda")
    with torch.no_grad():
        fused(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


def test_a_scalar_on_the_cpu_runs_unfused() -> None:
    """PyTorch takes a 0-d tensor of the CPU beside CUDA tensors; the kernels read theirs on the device."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.divisor = nn.Linear(64, 64), torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(x)) / self.divisor

    model = Model().cuda()
    fused = epigemm.fuse(model)
    x = torch.randn(8, 64, device="cuda")
    with fusion.watch() as unfused:
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(unfused) == 1
