"""The fallback of the linear functions: how PyTorch's GEMM is called, and that bias and ReLU are right in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.epilogues.library import BIAS, BIAS_RELU, RELU_DIV
from epigemm.epilogues.registry import Epilogue
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import PRODUCT, WITH_BIAS, WITH_BIAS_AND_RELU
from tests.gemm.query import is_one_kernel
from tests.support import reference
from tests.support.arithmetic import BF16, FP16, FP32, FP64, STORAGE, Arithmetic
from tests.support.cases import Operands
from tests.support.pretended import describe
from tests.support.untyped import backends

WITH_RELU = [FP16, BF16, FP32]
arithmetics = pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
SHAPES = [(24, 40, 32), (1, 40, 32), (24, 1, 32), (24, 40, 1), (1, 1, 1), (129, 257, 96)]


WITH_KERNELS = (90, 132)


def know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as lying on a GPU without epigemm's kernels, of whose speed nothing is known."""
    asked = dry_runs.dry_run
    monkeypatch.setattr(dry_runs, "dry_run", lambda call, *_, **options: asked(call, 0, call.x, **options))


@pytest.fixture
def in_one_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which torch's GEMM adds bias and ReLU: the CPU too, where the operator exists."""
    if device.type == "cpu":
        know_nothing(monkeypatch)
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


@pytest.mark.parametrize(
    ("m", "tf32", "gemm"), [(4, False, WITH_BIAS), (5, False, PRODUCT), (4, True, PRODUCT)]
)
def test_few_rows_in_fp32(m: int, tf32: bool, gemm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's GEMM adds their bias, where that was measured to be no slower."""
    describe(monkeypatch, WITH_KERNELS)
    setting = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        x, weight, bias = draw((m, 40, 32), FP32, torch.device("cpu"))
        call = LinearCall(RELU_DIV, x, weight, (bias, 2.0))
        assert dry_runs.dry_run(call, gpu=WITH_KERNELS).gemm == gemm
    finally:
        torch.backends.cuda.matmul.allow_tf32 = setting


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as lying on a GPU with epigemm's kernels."""
    describe(monkeypatch, WITH_KERNELS, kernels=True)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
@pytest.mark.parametrize("sizes", [(15, 8192, 4096), (15, 1001, 4096), (1, 128, 256)], ids=str)
def test_the_planner_says_whether_a_product_comes_without_the_bias(
    sizes: tuple[int, int, int], arithmetic: Arithmetic, tf32: bool, with_kernels: None
) -> None:
    """By the call's sizes, its dtype and, in fp32, torch's setting."""
    m, n, k = sizes
    backends.mkldnn.matmul.fp32_precision = "bf16" if tf32 else "ieee"
    dtype = arithmetic.dtype
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((1, m, k), (n, k), (n,)))
    name = str(dtype).removeprefix("torch.")
    one_kernel = is_one_kernel(m, n, k, name, tf32 and dtype == torch.float32, WITH_KERNELS)
    # In 16 bits the bias is added before the sum is rounded.
    apart = WITH_BIAS if dtype.itemsize == 2 else PRODUCT
    assert gemm_of(BIAS_RELU, x, weight, bias) == (WITH_BIAS_AND_RELU if one_kernel else apart)
    assert gemm_of(BIAS, x, weight, bias) == (WITH_BIAS if one_kernel else apart)
    assert gemm_of(BIAS, x, weight, None) == PRODUCT, "nothing to add"
    if sizes == (15, 8192, 4096):
        assert one_kernel == (tf32 or dtype != torch.float32)


@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_the_planner_is_not_asked_without_kernels(
    arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and on a GPU where epigemm has none."""
    x, weight, bias = draw((16, 40, 4096), arithmetic, torch.device("cpu"))
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(BIAS_RELU, x, weight, bias) == (WITH_BIAS if arithmetic.dtype.itemsize == 2 else PRODUCT)
    know_nothing(monkeypatch)
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(BIAS_RELU, x, weight, bias) == (PRODUCT if arithmetic is FP64 else WITH_BIAS_AND_RELU)


@pytest.mark.parametrize(("k", "one_kernel"), [(64, True), (4096, False)])
def test_explain_tells_whether_the_bias_is_a_kernel_of_its_own(
    k: int, one_kernel: bool, with_kernels: None
) -> None:
    x, weight, bias = draw((24, 40, k), FP32, torch.device("cpu"))
    told = epigemm.explain("linear", x, weight, bias, precision="ieee").kernels
    assert len(told) == (1 if one_kernel else 2) and ("with the bias" in told[0]) is one_kernel
    actual = epigemm.linear(x, weight, bias, precision="ieee")
    bounded = reference.linear("bias", x, weight, Operands(bias=bias), FP32, second_path=not one_kernel)
    reference.assert_within(actual, bounded)


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
