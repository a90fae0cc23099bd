"""The fallback of the linear functions: how PyTorch's GEMM is called, and that bias and ReLU are right in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import BIAS, BIAS_RELU, RELU_DIV
from epigemm.epilogues.registry import Epilogue
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import PRODUCT, WITH_BIAS, WITH_BIAS_AND_RELU
from tests.support import reference
from tests.support.arithmetic import BF16, FP16, FP32, FP64, STORAGE, Arithmetic
from tests.support.cases import Operands
from tests.support.pretended import describe

WITH_RELU = [FP16, BF16, FP32]
arithmetics = pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
SHAPES = [(24, 40, 32), (1, 40, 32), (24, 1, 32), (24, 40, 1), (1, 1, 1), (129, 257, 96)]


@pytest.fixture
def in_one_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which torch's GEMM adds bias and ReLU: the CPU too, which counts as an H200."""
    if device.type == "cpu":
        describe(monkeypatch)
    return device


def run_fallback(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return resolve.linear(LinearCall(BIAS_RELU, x, weight, (bias,), out=out), dry_runs.FALLBACK)


def gemm_of(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """What torch's GEMM is to do."""
    operands = (bias, 2.0) if epilogue.has_scalar else (bias,)
    return dry_runs.dry_run(LinearCall(epilogue, x, weight, operands), plan=dry_runs.FALLBACK).gemm


def draw(shape: tuple[int, int, int], arithmetic: Arithmetic, device: torch.device) -> tuple[Tensor, ...]:
    m, n, k = shape
    return tuple(torch.randn(size).to(device, arithmetic.dtype) for size in ((m, k), (n, k), (n,)))


def check(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor, arithmetic: Arithmetic) -> None:
    """Against float64, rounded once; a single column twice, by torch's mm and by our kernel."""
    operands, twice = Operands(bias=bias), weight.shape[0] == 1
    bounded = reference.linear("bias_relu", x, weight, operands, arithmetic, second_path=twice)
    reference.assert_within(actual, bounded)


def launched(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> list[str]:
    call = LinearCall(BIAS_RELU, x, weight, (bias,), out=out)
    return dry_runs.dry_run(call, plan=dry_runs.FALLBACK).launches


@arithmetics
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_relu_in_one_kernel(
    arithmetic: Arithmetic, shape: tuple[int, int, int], in_one_kernel: torch.device
) -> None:
    x, weight, bias = draw(shape, arithmetic, in_one_kernel)
    check(run_fallback(x, weight, bias), x, weight, bias, arithmetic)
    # A single column is a matrix times a vector to torch, which rounds before it adds the bias.
    assert (launched(x, weight, bias) == ["torch_gemm"]) == (shape[1] > 1)
    out = torch.full((shape[0], shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    assert run_fallback(x, weight, bias, out) is out
    check(out, x, weight, bias, arithmetic)


def test_where_torchs_gemm_does_not_add_the_relu(in_one_kernel: torch.device) -> None:
    """Another epilogue, no bias, gaps in bias or out, float64, an empty sum, one column: ours, and right."""
    x, weight, bias = draw((24, 40, 32), FP32, in_one_kernel)
    gaps = torch.empty(24, 48, device=x.device)[:, :40]
    spread = torch.randn(80, device=x.device)[::2]
    assert gemm_of(BIAS_RELU, x, weight, bias) == WITH_BIAS_AND_RELU
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(RELU_DIV, x, weight, bias) == PRODUCT
    cases: list[tuple[Any, ...]] = [
        (x, weight, None, None),
        (x, weight, spread, None),
        (x, weight, bias, gaps),
        (x.double(), weight.double(), bias.double(), None),
        (x[:, :0], weight[:, :0], bias, None),
        (x[:0], weight, bias, None),
        (x, weight[:1], bias[:1], None),
    ]
    for call in cases:
        copies = ["copy_of_operands"] if call[2] is spread else []
        assert launched(*call) == [*copies, "torch_gemm", "elementwise"]
        expected = torch.relu(torch.nn.functional.linear(*call[:3]))
        torch.testing.assert_close(run_fallback(*call), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_one_launch_on_a_gpu(arithmetic: Arithmetic) -> None:
    """What explain says is what the profiler sees, where cuBLAS has no reason to split K."""
    x, weight, bias = draw((1024, 512, 256), arithmetic, torch.device("cuda"))
    out = run_fallback(x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_fallback(x, weight, bias, out)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    behind = [name for name in kernels if "epigemm" in name or "at::native" in name]
    assert bool(behind) == (arithmetic is FP64), kernels
