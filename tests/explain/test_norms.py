"""Explanations of a BatchNorm by the batch's own statistics behind a product: what runs, kernel by kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm import batch_statistics
from epigemm.calls.log import current
from epigemm.explain.answer import Explanation
from epigemm.planner import plans
from tests.gemm.query import H200
from tests.support import norm_calls

M, N, K = 4096, 2048, 1024
NORMALISED = "epigemm CUDA kernel, normalisation; the running statistics"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    norm_calls.pretended(monkeypatch)


def explained(layer: nn.Module, x: Tensor) -> Explanation:
    """Of its only product. Afterwards nothing is noted any more."""
    (product,) = epigemm.explain(layer, x).products
    assert current.log is None
    assert product.explanation is not None
    return product.explanation


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_products_kernel_reduces_what_it_stores(dtype: torch.dtype) -> None:
    layer = epigemm.nn.LinearScaleBatchNorm1d(K, N, dtype=dtype)
    found = explained(layer, torch.zeros(M, K, dtype=dtype))
    gemm = next(each for each in found.kernels if "fused GEMM" in each)
    behind = found.kernels[-2:]
    assert found.path == "fused" and gemm == found.kernel and gemm.endswith("epilogue bias")
    assert behind == [
        "epigemm CUDA kernel, mean and variance of the columns, from those of the blocks",
        NORMALISED,
    ]
    assert "the product's kernel reduces" in found.reasons[0] and "two sums of each column" in found.backward
    assert "linear_scale_batch_norm, by the batch's own statistics" in found.op


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_blocks_are_merged_where_it_normalises(dtype: torch.dtype) -> None:
    layer = epigemm.nn.LinearScaleBatchNorm1d(64, 512, momentum=None, dtype=dtype)
    for rows in (1024, 1300):
        found = explained(layer, torch.zeros(rows, 64, dtype=dtype))
        merge = "mean and variance of the columns, from those of the blocks"
        is_apart = f"epigemm CUDA kernel, {merge}" in found.kernels
        assert is_apart == (rows > 1024)
        *_, counted, last = found.kernels
        assert counted == "torch add_, to the number of batches"
        assert last == (NORMALISED if is_apart else NORMALISED.replace("normal", f"{merge}; normal", 1))


@pytest.mark.usefixtures("described")
def test_in_fp64_a_kernel_reads_the_product() -> None:
    layer = epigemm.nn.LinearBatchNormReLU(K, N, track_running_stats=False, dtype=torch.float64)
    with torch.no_grad():
        found = explained(layer, torch.zeros(M, K, dtype=torch.float64))
    *_, blocks, merged, normalised = found.kernels
    assert blocks == "epigemm CUDA kernel, mean and variance of blocks of rows"
    assert "of the columns" in merged and normalised == "epigemm CUDA kernel, normalisation and ReLU"
    assert "a kernel behind the product" in found.reasons[0] and found.backward.startswith("not needed")
    assert found.op.endswith("linear_batch_norm_relu, by the batch's own statistics")


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("hooked", [False, True])
def test_why_torchs_batch_norm_runs(hooked: bool) -> None:
    layer = epigemm.nn.LinearBatchNormReLU(16, 8)
    if hooked:
        layer.bn.register_forward_hook(lambda *_: None)
    else:
        layer.bn.num_batches_tracked = torch.tensor(0, dtype=torch.int32)
    found = explained(layer, torch.randn(4, 16))
    why = "hooks" if hooked else "do not take"
    assert found.reasons[0].startswith("PyTorch's BatchNorm follows: ") and why in found.reasons[0]
    assert found.kernels[-2:] == ["torch batch_norm", "torch relu"]
    assert found.backward.startswith("torch's derivative of torch relu and torch batch_norm; then ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_the_products_kernel_has_the_scale(dtype: torch.dtype) -> None:
    layer = epigemm.nn.LinearScaleBatchNorm1d(16, 8, dtype=dtype)
    mean = layer.bn.running_mean
    assert mean is not None
    before = mean.clone()
    found = explained(layer, torch.randn(4, 16).to(dtype))
    assert found.reasons[0].endswith("no kernels for batch statistics on cpu")
    assert found.kernels[-1] == "torch batch_norm" and "torch mul" not in found.kernels
    assert layer.bn.running_mean is mean and torch.equal(before, mean)


def test_a_layer_in_eval_mode_is_one_call() -> None:
    found = explained(epigemm.nn.LinearScaleBatchNorm1d(16, 8).eval(), torch.randn(4, 16))
    assert "torch batch_norm" not in found.kernels


@pytest.mark.parametrize("served", [True, False])
def test_in_a_fused_model(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(16, 8), nn.BatchNorm1d(8)
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Any:
            return torch.relu(self.bn(self.fc(x) * self.scale))

    norm_calls.pretended(monkeypatch)
    fused, x = epigemm.fuse(Model(), options={"backend": "eager"}), torch.randn(4, 16)
    fused(x)
    monkeypatch.setattr(batch_statistics, "is_served", lambda x: served)
    (product,) = epigemm.explain(fused, x).products
    assert product.explanation is not None
    kernels = product.explanation.kernels
    if served:
        assert kernels[-1].startswith("epigemm CUDA kernel, mean and variance of the columns")
        assert kernels[-1].endswith("; normalisation and ReLU; the running statistics")
    else:
        # The scale stays with the product; BatchNorm and ReLU are PyTorch's, behind it.
        gemm, scaled = kernels
        assert gemm == "torch GEMM (addmm, with the bias)" and scaled.startswith(
            "PyTorch reference, add_mul."
        )
